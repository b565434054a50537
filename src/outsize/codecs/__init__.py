"""How bytes are written when they cross a boundary: exactly in fewer, or within a stated error in fewer still."""
