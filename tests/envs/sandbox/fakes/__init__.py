"""Small servers, each true to the protocol of one sandbox service, whose machines are bubblewraps of this machine.

They follow what the clients of the services send: the engine's command line, the API server's pods and exec
websocket, E2B's REST and envd, Daytona's REST and toolbox, SWE-ReX's server, Modal's package. What a service would
refuse (no credential, an unknown flag, a privileged pod), they refuse.
"""
