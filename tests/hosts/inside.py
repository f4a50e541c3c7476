"""`inside NAMESPACE NAME MODULE ARGUMENTS...`: runs a module on a host, for processes that are forked."""

import runpy
import sys

from tests.hosts.network import Host

if __name__ == "__main__":
    namespace, name, module, *arguments = sys.argv[1:]
    Host(name, namespace, "", "").enter()
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
