"""What each command does with what a config composes."""
