"""The emulated cluster: network namespaces, shaped ports, and the processes in them."""
