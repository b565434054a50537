"""What remembers who wrote and who reads a resource: the last writer and the readers since.

Ops are known by their sequence numbers; -1 is nobody.
"""

# What is read for ever and never written (the home of a frozen unit) must not grow a list for ever: a reader
# that finds this many others waits for them and stands for them. They are older by more programs than are
# ever in flight.
_MAX_READERS = 64

Deps = set[int]


class Cell:
    """Last writer of a resource and its readers since."""

    __slots__ = ("readers", "writer")

    def __init__(self) -> None:
        self.writer = -1
        self.readers: list[int] = []

    def read(self, seq: int, deps: Deps) -> None:
        """Let op ``seq`` read; adds to ``deps`` what it must wait for, as all these methods do."""
        if self.writer >= 0:
            deps.add(self.writer)
        if len(self.readers) >= _MAX_READERS:
            deps.update(self.readers)
            self.readers.clear()
        self.readers.append(seq)

    def write(self, seq: int, deps: Deps) -> None:
        """Let op ``seq`` write, or read and write."""
        if self.readers:  # each of which waited for the writer
            deps.update(self.readers)
            self.readers.clear()
        elif self.writer >= 0:
            deps.add(self.writer)
        self.writer = seq


class HomeResource:
    """A unit's weights and optimizer state at rest: read whole or by tile, written whole or by tile.

    A whole reader that follows a write stands for the whole readers before that write: it waits for all
    writers, and each of those waited for them.
    """

    __slots__ = ("tiles", "whole", "written")

    def __init__(self) -> None:
        self.whole = Cell()
        self.tiles: dict[int, Cell] = {}
        self.written = False

    def read_all(self, seq: int, deps: Deps) -> None:
        """Let op ``seq`` read all tiles."""
        deps.update(cell.writer for cell in self.tiles.values())
        if self.written:
            self.whole.readers.clear()
            self.written = False
        self.whole.read(seq, deps)

    def write_all(self, seq: int, deps: Deps) -> None:
        """Let op ``seq`` write all tiles."""
        for cell in self.tiles.values():
            deps.update(cell.readers or (cell.writer,))
        self.tiles.clear()
        self.whole.write(seq, deps)

    def read_tile(self, tile: int, seq: int, deps: Deps) -> None:
        """Let op ``seq`` read one tile."""
        if self.whole.writer >= 0:
            deps.add(self.whole.writer)
        self._tile(tile).read(seq, deps)

    def write_tile(self, tile: int, seq: int, deps: Deps) -> None:
        """Let op ``seq`` write one tile."""
        deps.update(self.whole.readers or (self.whole.writer,))
        self._tile(tile).write(seq, deps)
        self.written = True

    def _tile(self, tile: int) -> Cell:
        cell = self.tiles.get(tile)
        if cell is None:
            cell = self.tiles[tile] = Cell()
        return cell
