"""The second clock: programs walked in virtual time, and where their time goes."""
