"""Sandboxes on other machines, all through one base.

base        a machine of a service runs one program with given input; everything else is the supervisor's, which goes
            with each request (`sandboxed/supervisor.py`)
containers  Docker and Podman; kubernetes, e2b, daytona, swerex: their HTTP interfaces; modal: its own package
"""
