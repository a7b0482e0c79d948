"""The start script: the few lines of POSIX shell that a provider runs first on a fresh machine."""

from spotd_jobs.start.script import SCRIPT_BYTES_MAX, ScriptTooLong, start_script

__all__ = ["SCRIPT_BYTES_MAX", "ScriptTooLong", "start_script"]
