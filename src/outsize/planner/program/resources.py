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


class Signal(Cell):
    """What says something only once somebody has written it; until then nobody has read it either."""

    def read(self, seq: int, deps: Deps) -> None:
        """Let op ``seq`` read."""
        if self.writer >= 0:
            super().read(seq, deps)


class Remembered(Cell):
    """What a checkpoint keeps: its writers wait for the last reader, and for nothing else."""

    def read(self, seq: int, deps: Deps) -> None:
        """Let op ``seq`` read."""
        self.readers = [seq]

    def write(self, seq: int, deps: Deps) -> None:
        """Let op ``seq`` write."""
        deps.update(self.readers)


class HomeResource:
    """A unit's weights and optimizer state at rest: read whole or by tile, written whole or by tile.

    A whole reader that follows a write stands for the whole readers before that write: it waits for all
    writers, and each of those waited for them.
    """

    __slots__ = ("tiles", "whole", "written")

    def __init__(self) -> None:
        self.whole = Cell()
        self.tiles: dict[int, _Tile] = {}
        self.written = False

    @property
    def writer(self) -> int:
        """The last op that has written all of it."""
        return self.whole.writer

    def read(self, seq: int, deps: Deps) -> None:
        """Let op ``seq`` read all tiles."""
        deps.update([cell.writer for cell in self.tiles.values()])
        if self.written:
            self.whole.readers.clear()
            self.written = False
        self.whole.read(seq, deps)

    def write(self, seq: int, deps: Deps) -> None:
        """Let op ``seq`` write all tiles."""
        for cell in self.tiles.values():
            deps.update(cell.readers or (cell.writer,))
        self.tiles.clear()
        self.whole.write(seq, deps)

    def tile(self, tile: int) -> "_Tile":
        """Return the resource that is one tile."""
        cell = self.tiles.get(tile)
        if cell is None:
            cell = self.tiles[tile] = _Tile(self)
        return cell


class _Tile(Cell):
    __slots__ = ("home",)

    def __init__(self, home: HomeResource) -> None:
        super().__init__()
        self.home = home

    def read(self, seq: int, deps: Deps) -> None:
        """Let op ``seq`` read one tile."""
        if self.home.whole.writer >= 0:
            deps.add(self.home.whole.writer)
        super().read(seq, deps)

    def write(self, seq: int, deps: Deps) -> None:
        """Let op ``seq`` write one tile."""
        whole = self.home.whole
        deps.update(whole.readers or (whole.writer,))
        super().write(seq, deps)
        self.home.written = True
