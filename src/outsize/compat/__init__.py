"""Private names of other libraries: each in one function of its own, imported when it is called, with a test."""
