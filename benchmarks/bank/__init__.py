"""A fixed bank of planning and solving problems, whose answers a refactor must leave as they are.

| module      | idea                                                                  |
|-------------|-----------------------------------------------------------------------|
| `questions` | every problem by its name                                             |
| `answers`   | what the package is asked for a problem                               |
| `records`   | what of its answers is kept, in words that survive renames            |
| `made_up`   | a profile as measured on processes that share cores, seconds made up  |
"""
