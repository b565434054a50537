"""From files to documents: which files, their records, and what a record means."""
