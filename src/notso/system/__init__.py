"""Provide one set of functions for everything that differs between Linux and macOS.

No other package reads /proc or /sys, checks the operating system, or uses APIs that one of the two systems lacks. This
package imports only the standard library, because child processes import it without the rest of notso.
"""
