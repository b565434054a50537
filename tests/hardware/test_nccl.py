from outsize.hardware.link_fit import misspelt_variables, overriding_variables, wrong_interfaces


def test_an_interface_that_is_not_there_is_told():
    assert wrong_interfaces({"GLOO_SOCKET_IFNAME": "eth7"}, ["lo", "eth0"]) == [
        "GLOO_SOCKET_IFNAME=eth7, but the interfaces are eth0, lo"
    ]
    assert wrong_interfaces({"GLOO_SOCKET_IFNAME": "eth"}, ["lo", "eth0"])
    assert not wrong_interfaces({"GLOO_SOCKET_IFNAME": "eth7,eth0"}, ["lo", "eth0"])


def test_nccl_takes_beginnings_exact_names_and_exclusions():
    interfaces = ["lo", "ib0", "ib1"]
    for value in ("ib", "=ib0", "^docker", "eth,ib", ""):
        assert not wrong_interfaces({"NCCL_SOCKET_IFNAME": value}, interfaces), value
    for value in ("eth", "=ib", "ib2"):
        assert wrong_interfaces({"NCCL_SOCKET_IFNAME": value}, interfaces), value


def test_variables_that_cost_and_variables_that_are_none():
    assert overriding_variables({"NCCL_P2P_DISABLE": "1", "PATH": "x"}) == [
        "NCCL_P2P_DISABLE=1: no copies between GPUs without the host"
    ]
    assert misspelt_variables({"NCCL_SOKET_IFNAME": "eth0", "NCCL_TIMEOUT": "9"}) == [
        "NCCL_SOKET_IFNAME is none of NCCL's; NCCL_SOCKET_IFNAME is",
        "NCCL_TIMEOUT is none of NCCL's",
    ]
