"""The codecs of a run, on the link and between ranks, checked against its machine."""

from outsize.accelerators import Devices
from outsize.choices import Home
from outsize.codecs.transport import Transport
from outsize.codecs.wire import Wire
from outsize.config import Config
from outsize.errors import ConfigError
from outsize.model.sizes.model_spec import ModelSpec
from outsize.session.job.machine import RunMachine


def check_transport(transport: Transport, devices: Devices, home: Home) -> None:
    """Check that the codecs run on ``devices``, and with a home there.

    Raises:
        ConfigError: there is no such link on this machine, or the codec does not run there.
    """
    if transport == Transport():
        return
    if devices.is_cpu:
        raise ConfigError("transport: a cpu computes where the host memory is, over no link; leave it raw")
    if home == "disk" and not transport.is_raw("weights"):
        raise ConfigError(
            "transport.weights: encodings of weights are kept in host memory, and the home is on disk; leave it raw, "
            "or set memory.home=host"
        )
    if devices.accelerated:
        for crossing in ("activations", "gradients"):
            if transport.spec(crossing).lossless and not transport.is_raw(crossing):
                raise ConfigError(
                    f"transport.{crossing}: {getattr(transport, crossing)} is encoded on a CPU only; use int8 or raw"
                )


def wire_of(config: Config, spec: ModelSpec, machine: RunMachine) -> Wire:
    """Return the codecs between ranks.

    Raises:
        ConfigError: changes of weights are asked for where there are none to be had.
    """
    wire = Wire(gradients=config.parallel.gradients, weights=config.parallel.weights)
    if wire.weights == "delta" and (spec.dtype == "fp32" or machine.home == "disk"):
        raise ConfigError(
            "parallel.weights: delta is of 16-bit weights in host memory, and here "
            + ("weights are fp32" if spec.dtype == "fp32" else "the home is on disk")
            + "; leave it raw"
        )
    return wire
