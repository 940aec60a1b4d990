#!/usr/bin/python3
"""Stands in for systemd-run in a VM without systemd: a command once, after some seconds."""

import os
import sys
import time


def main(arguments: list[str]) -> None:
    options = [word for word in arguments if word.startswith("--")]
    (after,) = [option.partition("=")[2] for option in options if option.startswith("--on-active=")]
    command = arguments[len(options) :]
    if os.fork() == 0:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):  # whoever armed the timer does not wait for it
            os.dup2(nothing, stream)
        time.sleep(float(after))
        os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
