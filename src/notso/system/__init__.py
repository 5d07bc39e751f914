"""Everything that depends on the operating system, Linux or macOS, behind common functions.

No other package reads /proc or /sys, checks the operating system, or uses APIs that one of the systems lacks. This
package imports only the standard library, because child processes import it without the rest of notso.
"""
