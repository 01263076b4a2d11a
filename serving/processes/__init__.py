"""One server in several processes: host 0 leads, the others repeat its device calls.

A *host* is one process of the group here, whatever machine it runs on. Host 0 has the gRPC port,
the engine and the schedulers. The others hold their part of the model and make the same calls with
the same arrays in the same order. All talk over one TCP connection each to host 0; if one process
dies, hangs or falls out of step, all end.
"""
