"""What commands read and write: console, columns, options, and records in words."""
