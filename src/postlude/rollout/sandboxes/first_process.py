"""What runs first inside a sandbox with a network of its own, and becomes the program.

It listens at the proxy's address inside and hands that socket to the supervisor outside, which connects what arrives
to the proxy. So nothing of Postlude stays inside. Sandboxes run the text of this file by `python3 -c`, with whatever
Python 3 they have. Arguments: the Unix socket of the supervisor, HOST:PORT or "", the limit of processes or 0, and the
program's command line.
"""

import array
import os
import signal
import socket
import sys


def hand_over(path, address):  # type: ignore[no-untyped-def]
    """Sends a socket that listens at the address to the supervisor, and waits until it was received."""
    host, port = address.rsplit(":", 1)
    listener = socket.socket()
    listener.bind((host, int(port)))
    listener.listen(128)
    supervisor = socket.socket(socket.AF_UNIX)
    supervisor.connect(path)
    descriptors = array.array("i", [listener.fileno()])
    supervisor.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
    if not supervisor.recv(1):
        raise OSError("the supervisor did not take the socket")


def main(path, address, processes, *argv):  # type: ignore[no-untyped-def]
    """Prepares the sandbox, and becomes the program."""
    try:
        if address:
            hand_over(path, address)
        if int(processes):
            import resource  # noqa: PLC0415 - small installations do not have it

            resource.setrlimit(resource.RLIMIT_NPROC, (int(processes), int(processes)))
        for name in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
            signal.signal(name, signal.SIG_DFL)
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.stderr.write(f"{argv[0]} cannot be started in the sandbox: {error.strerror or error}.\n")
        sys.exit(127)


if __name__ == "__main__":
    main(*sys.argv[1:])
