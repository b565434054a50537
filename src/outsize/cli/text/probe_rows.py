"""What streaming, several devices and data reach, in rows of name, figure and remark."""

from collections.abc import Iterable

from outsize.hardware.cgroup import Measurement
from outsize.hardware.machine_file import DeviceRates, MachineFile
from outsize.hardware.streaming import break_even_tokens, starved_share
from outsize.units import format_bytes, format_rate, format_seconds

_Row = tuple[str, str, str]
_NOISY = "; noisy, measured twice"
# Tokens that pass through a unit while it is on the device, in the examples of a table.
_TOKENS = (128, 1024, 8192)


def streaming_rows(device: DeviceRates) -> Iterable[_Row]:
    """Yield the throttle of an emulated device, overlap, ways of feeding, the model's shapes, memory of other nodes."""
    name = device.device
    throttle = device.throttle_bytes_per_s.number()
    if throttle is not None:
        yield (f"{name} link is held to", format_rate(throttle), device.throttle_bytes_per_s.source)
    if device.overlap is not None and device.overlap.hidden_share() is not None:
        overlap, slower = device.overlap, device.overlap.slowdown()
        texts = (
            "" if slower is None else f"beside each other: product {slower[0]:.2f}x, copies {slower[1]:.2f}x"
        )
        noisy = _NOISY if overlap.is_noisy() else ""
        yield (f"{name} copies hidden behind a product", f"{overlap.hidden_share():.0%}", texts + noisy)
    if device.feed is not None and device.feed.compute_s.median is not None:
        feed, noisy = device.feed, _NOISY if device.feed.is_noisy() else ""
        for way, rate in feed.bytes_per_s.items():
            share = feed.busy_share(way)
            texts = "" if share is None else f"compute busy {share:.0%}{noisy}"
            yield (f"{name} fed from {feed.source}, {way}", _rate(rate), texts)
    for shape in device.shapes:
        for dtype, rate in shape.flops_per_s.items():
            figure = "not measured" if rate.median is None else f"{rate.median / 1e12:.3g} TFLOP/s"
            size = f"{shape.num_outputs} x {shape.num_inputs}, {shape.num_tokens} tokens"
            yield (f"{name} {shape.name} {dtype}", figure, size)
    for numa in device.numa:
        near = {True: "its own", False: "another one", None: ""}[numa.local]
        yield (f"{name} from memory of node {numa.memory_node}", _rate(numa.copy_bytes_per_s), near)


def ratio_rows(probed: MachineFile, device: DeviceRates) -> Iterable[_Row]:
    """Yield what memory and products are beside the link that feeds them: ratios, and how far compute would starve."""
    fits = [link.fit for link in device.links if link.direction == "up" and link.fit is not None]
    if not fits:
        return
    name, link_bytes_per_s = device.device, max(fit.bytes_per_s for fit in fits)
    memories = {
        "host memory": probed.host.dram_copy_bytes_per_s.median,
        "device memory": device.memory_triad_bytes_per_s.median,
    }
    for memory, rate in memories.items():
        if rate is not None:
            yield (f"{name}: {memory} over link", f"{rate / link_bytes_per_s:.1f} x", format_rate(rate))
    for dtype, weight_bytes in (("bf16", 2), ("fp32", 4)):
        flops = device.matmul_flops_per_s.get(dtype)
        if flops is None or flops.median is None:
            continue
        enough = break_even_tokens(flops.median, link_bytes_per_s, weight_bytes)
        shares = (
            f"{starved_share(tokens, flops.median, link_bytes_per_s, weight_bytes):.0%} at {tokens:,}"
            for tokens in _TOKENS
        )
        text = f"compute starves {', '.join(shares)} tokens per visit"
        yield (f"{name}: {dtype} weights hidden from", f"{enough:,.0f} tokens", text)


def several_rows(probed: MachineFile) -> Iterable[_Row]:
    """Yield copies of all GPUs at once and between them, sums over processes, tokenizer and loader."""
    for rate in probed.together:
        alone = f"{_rate(rate.alone_bytes_per_s)} alone"
        yield (f"{rate.device} {rate.direction} while all copy", _rate(rate.together_bytes_per_s), alone)
    for peer in probed.peers:
        kinds = f"{peer.by_rate.value or 'not known'} by rate, {peer.by_topology.value or 'not known'} by topology"
        yield (f"{peer.target} from {peer.source}", _rate(peer.copy_bytes_per_s), kinds)
    if probed.all_reduce is not None and probed.all_reduce.points:
        sums = probed.all_reduce
        for point in (sums.points[0], sums.points[-1]):
            bus = f"bus bandwidth {_rate(point.bus_bytes_per_s)}"
            size = format_bytes(point.num_bytes)
            seconds = format_seconds(point.seconds.median or 0.0)
            yield (f"all-reduce of {size}, {sums.backend}, {sums.num_ranks} ranks", seconds, bus)
    for codec in probed.codecs:
        ratio, bound, error = (
            fact.number() or 0.0 for fact in (codec.ratio, codec.bound, codec.relative_error)
        )
        loss_text = "lossless" if error == 0 else f"error {error:.2g}"
        rates_text = f"in {_rate(codec.encode_bytes_per_s)}, out {_rate(codec.decode_bytes_per_s)} per core"
        name = f"{codec.codec} on {codec.kind}, {codec.dtype}"
        yield (name, f"{ratio:.3f} of the bytes", f"{loss_text}, bound {bound:.3f}; {rates_text}")
    if probed.data is not None:
        for count, tokens in probed.data.tokenizer_tokens_per_s.items():
            yield (f"tokenizer, threads: {count}", _tokens(tokens), str(probed.data.tokenizer.value or ""))
        for count, tokens in probed.data.loader_tokens_per_s.items():
            yield (f"loader, threads: {count}", _tokens(tokens), "")


def _rate(rate: Measurement) -> str:
    return "not measured" if rate.median is None else format_rate(rate.median)


def _tokens(rate: Measurement) -> str:
    return "not measured" if rate.median is None else f"{rate.median / 1e6:.3g} M tokens/s"
