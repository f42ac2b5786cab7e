"""Devices by name, and which streams use a piece of memory."""

import pytest
import torch

from vtensor.devices import device_name, resolve_device
from vtensor.errors import VTensorError
from vtensor.streams import StreamUse, check_not_capturing

CPU = torch.device("cpu")


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return torch.device("cuda", 0)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", CPU, torch.device("cpu", 0)])
def test_the_host_has_no_index(device: torch.device | str) -> None:
    assert resolve_device(device) == CPU
    assert resolve_device(device).index is None


def test_none_is_torchs_default_device() -> None:
    assert resolve_device(None) == CPU
    with torch.device("meta"), pytest.raises(ValueError, match="'cpu' or 'cuda'"):
        resolve_device(None)
    torch.set_default_device("meta")
    try:
        with pytest.raises(ValueError, match="'cpu' or 'cuda'"):
            resolve_device(None)
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("device", ["meta", "mps", torch.device("xpu", 1)])
def test_other_devices_are_refused_by_name(device: torch.device | str) -> None:
    with pytest.raises(ValueError, match=r"device=.*(meta|mps|xpu).*live on 'cpu' or 'cuda'"):
        resolve_device(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_cuda_without_cuda_says_so(device: str) -> None:
    with pytest.raises(ValueError, match="sees no CUDA device"):
        resolve_device(device)


def test_names() -> None:
    assert device_name(CPU) == "cpu"
    assert device_name(torch.device("cuda", 3)) == "cuda:3"


def test_the_host_has_no_streams() -> None:
    use = StreamUse(CPU)
    assert use.current() == 0
    use.add(object())  # whatever it is, there is nothing to wait for
    assert use.record() == []
    use.wait([])
    check_not_capturing(CPU, "step")


@pytest.mark.gpu
def test_cuda_devices_get_an_index(cuda: torch.device) -> None:
    current = torch.cuda.current_device()
    assert resolve_device("cuda") == torch.device("cuda", current)
    assert resolve_device("cuda:0") == cuda
    with pytest.raises(ValueError, match="CUDA devices"):
        resolve_device(torch.device("cuda", 99))
    with cuda:
        assert resolve_device(None) == cuda


@pytest.mark.gpu
def test_an_event_for_every_stream(cuda: torch.device) -> None:
    use, side = StreamUse(cuda), torch.cuda.Stream(cuda)
    assert use.current() == torch.cuda.current_stream(cuda).cuda_stream
    use.add(side)
    use.add(side)
    assert len(use.record()) == 2
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        assert use.current() == side.cuda_stream
        events = use.record()
    assert len(events) == 2
    assert not all(event.query() for event in events)  # side is not done
    for event in events:
        event.synchronize()
    assert all(event.query() for event in events)


@pytest.mark.gpu
def test_waiting_is_the_streams_business(cuda: torch.device) -> None:
    use, side = StreamUse(cuda), torch.cuda.Stream(cuda)
    done = torch.zeros(1, device=cuda)
    torch.cuda.synchronize(cuda)
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        done.fill_(1)
        events = StreamUse(cuda).record()
    use.wait(events)
    assert not side.query()  # the caller did not wait
    assert done.clone().item() == 1  # its stream does


@pytest.mark.gpu
@pytest.mark.parametrize("stream", ["not a stream", None])
def test_only_streams_of_the_device(cuda: torch.device, stream: object) -> None:
    with pytest.raises(ValueError, match=r"is not a torch\.cuda\.Stream of cuda:0"):
        StreamUse(cuda).add(stream)


@pytest.mark.gpu
def test_capturing_is_noticed(cuda: torch.device) -> None:
    check_not_capturing(cuda, "step")
    value, graph = torch.zeros(1, device=cuda), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value.add_(1)
        with pytest.raises(VTensorError, match="step was called during a CUDA graph capture"):
            check_not_capturing(cuda, "step")
    graph.replay()
    assert value.item() == 1
