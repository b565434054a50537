"""What each op of a program does."""
