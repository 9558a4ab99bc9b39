"""Starts one rank of Horovod with Gloo where nothing like horovodrun is.

Horovod's ranks find each other through an HTTP server, which rank 0 runs beside its work.
"""

import os
import socket
import time


def serve(address, port, hosts):
    """Horovod's own rendezvous, at a port that the others know. Returns it: keep it."""
    from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
    from horovod.runner.util.threads import in_thread

    server = RendezvousHTTPServer((address, port), RendezvousHandler, 0)
    server.init(get_host_assignments([HostInfo(name, slots) for name, slots in hosts],
                                     sum(slots for _, slots in hosts)))
    in_thread(server.serve_forever)
    return server


def wait_for(address, port, seconds):
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((address, port), timeout=1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def start(rank, hosts, address, port, interface):
    """`hosts` is a list of (name, slots) in the order of ranks; `address` and `port` are those of
    the rendezvous, at rank 0. Returns what must be kept."""
    places = [(h, slot) for h, (_, slots) in enumerate(hosts) for slot in range(slots)]
    host, slot = places[rank]
    os.environ.update({
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(len(places)),
        "HOROVOD_LOCAL_RANK": str(slot),
        "HOROVOD_LOCAL_SIZE": str(hosts[host][1]),
        "HOROVOD_CROSS_RANK": str(host),
        "HOROVOD_CROSS_SIZE": str(len(hosts)),
        "HOROVOD_HOSTNAME": hosts[host][0],
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": interface,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    })
    server = serve(address, port, hosts) if rank == 0 else None
    if rank != 0:
        wait_for(address, port, 30)
    return server
