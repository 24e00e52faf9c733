"""Where ranks meet, and what a group needs to form."""

import os

import psutil
import pytest

from workers.config import EngineConfig, ParallelConfig
from workers.errors import EngineConfigError
from workers.rank import Rendezvous, lead_group


def test_rendezvous_listens_on_its_address_only() -> None:
    rendezvous = Rendezvous.open()
    listening = {
        connection.laddr.ip
        for connection in psutil.Process(os.getpid()).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == rendezvous.port
    }
    assert listening == {"127.0.0.1"}
    assert rendezvous.host == "127.0.0.1"


def test_a_group_of_several_ranks_needs_a_rendezvous() -> None:
    config = EngineConfig(model="anything", parallel=ParallelConfig(tensor_parallel=2))
    with pytest.raises(EngineConfigError, match="a group of 2 ranks needs a rendezvous"):
        lead_group(config)
