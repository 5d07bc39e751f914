"""Everything that depends on the operating system: Linux and macOS behind the same functions.

The only package that reads /proc and /sys, asks which system runs, or uses names that one of the systems lacks. It uses
the standard library only, and child processes that start without the rest of notso import it.
"""
