"""Allocates frame buffers of 1920x1080 in the guest's screen, and keeps them."""

import fcntl
import os
import struct
import sys
import time

CREATE_DUMB = 0xC02064B2

card = os.open("/dev/dri/card0", os.O_RDWR)
count = 0
for _ in range(int(sys.argv[1])):
    wanted = bytearray(struct.pack("IIIIIIQ", 1080, 1920, 32, 0, 0, 0, 0))
    fcntl.ioctl(card, CREATE_DUMB, wanted)
    count += 1
print(count, flush=True)
time.sleep(100000)
