"""The router: on which engine the next turn runs, as a pure library and as an HTTP front (`gruppetto route`).

`router` is the library, over `tickets`, `seats`, `sessions`, `waiting`, `lengths` and the rules of `gruppetto.routing`:
no sockets, no clock, nothing but the standard library. `front` is the server, over `upstream` and `http1` (engines are
spoken to), `wire` (what is read of a body), `forward` (data routes), `control` (fan-out) and `watch` (health).
"""
