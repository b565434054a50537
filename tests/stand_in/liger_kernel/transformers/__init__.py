"""As in Liger."""
