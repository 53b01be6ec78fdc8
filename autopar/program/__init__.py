"""The program that ranks run: its parts and schedule, their memory and source, the executor, and `verify`."""
