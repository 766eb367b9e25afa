"""Islands that come and go while a run trains, each a process of its own. Start with `island.py`.

`member.py` is the protocol, without I/O; `sockets.py` and `run_files.py` are its network and its folder.
"""
