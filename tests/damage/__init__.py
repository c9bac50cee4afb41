"""Generated damage: what a user may give, broken in all ways that chance finds, through every reader and command."""
