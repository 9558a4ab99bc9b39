"""One rank of a job of `weft lab run --engine openmpi`: emulated training over Open MPI.

  openmpi_worker.py FOLDER     started by mpirun; the job is FOLDER/rank-N.job.json

DDP's buckets, in bucket order, each by MPI_Allreduce in a thread of its own, so that backward goes
on meanwhile. MPI is called by its C names; its blocking calls leave Python's lock alone.
"""

import ctypes
import os
import queue
import sys
import threading

import training

SERIALIZED = 2  # MPI_THREAD_SERIALIZED
IN_PLACE = 1    # MPI_IN_PLACE
VERSION_BYTES = 256


class OpenMpi(training.Communicator):
    def __init__(self):
        self.todo = queue.Queue()
        self.started = 0
        self.finished = 0
        self.changed = threading.Condition()
        self.problem = None

    def symbol(self, name):
        return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(self.mpi, name)))

    def call(self, name, *arguments):
        code = getattr(self.mpi, name)(*arguments)
        if code != 0:
            raise RuntimeError("%s failed with code %d" % (name, code))

    def join(self, torch, job):
        self.mpi = ctypes.CDLL("libmpi.so.40", mode=ctypes.RTLD_GLOBAL)
        provided = ctypes.c_int()
        self.call("MPI_Init_thread", None, None, SERIALIZED, ctypes.byref(provided))
        if provided.value < SERIALIZED:
            raise RuntimeError("this Open MPI cannot be called from a second thread")
        self.world = self.symbol("ompi_mpi_comm_world")
        self.float = self.symbol("ompi_mpi_float")
        self.sum = self.symbol("ompi_mpi_op_sum")
        version, length = ctypes.create_string_buffer(VERSION_BYTES), ctypes.c_int()
        self.call("MPI_Get_library_version", version, ctypes.byref(length))
        self.name = version.value.decode(errors="replace").split(",")[0]
        self.call("MPI_Barrier", self.world)
        threading.Thread(target=self.communicate, daemon=True).start()

    def communicate(self):
        while True:
            buffer = self.todo.get()
            try:
                self.call("MPI_Allreduce", ctypes.c_void_p(IN_PLACE),
                          ctypes.c_void_p(buffer.data_ptr()), ctypes.c_int(buffer.numel()),
                          self.float, self.sum, self.world)
            except RuntimeError as problem:
                self.problem = problem
            with self.changed:
                self.finished += 1
                self.changed.notify_all()

    def start(self, gradients, group, step):
        self.started += 1
        self.todo.put(gradients.buffers[group])

    def wait(self):
        with self.changed:
            self.changed.wait_for(lambda: self.finished == self.started)
        if self.problem:
            raise self.problem
        return True

    def leave(self):
        self.call("MPI_Barrier", self.world)
        self.call("MPI_Finalize")


if __name__ == "__main__":
    rank = os.environ.get("OMPI_COMM_WORLD_RANK")
    training.main(OpenMpi(), os.path.join(sys.argv[1], "rank-%s.job.json" % rank))
