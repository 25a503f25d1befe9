"""Many replicas as one server: what bit-exactness makes possible.

A stream whose replica is lost goes on at another one, to the bit as if nothing had happened (`journal`, `remote`,
`replica`). Tokens travel over sockets of our own (`channel`). Nothing here imports Ray.
"""
