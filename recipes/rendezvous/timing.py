"""How long things may take between the nodes, in seconds."""

HEARTBEAT_SECONDS = 1.0
# A failure on one node makes others fail: the cause is picked once these have had time to report.
SETTLE_SECONDS = 2.0
TICK_SECONDS = 0.1
# A member not heard of for so long has gone, if another one comes under its number.
PRESENT_SECONDS = 5 * HEARTBEAT_SECONDS
# From a connection to its hello. Who has a part in the job needs milliseconds.
HANDSHAKE_SECONDS = 10.0
# Dropped connections are told of in one line in so long a time.
TELL_SECONDS = 30.0
