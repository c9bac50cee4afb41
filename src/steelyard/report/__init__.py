"""Tables and explanations of a plan."""
