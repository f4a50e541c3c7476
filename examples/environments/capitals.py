"""A server of the Model Context Protocol with one tool; the policy may call it in a job.

`python capitals.py` speaks over standard input and output, `python capitals.py PORT` over streamable HTTP at /mcp.
"""

import sys

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Kenya": "Nairobi", "Peru": "Lima"}
server = MCPServer("capitals")


@server.tool()
def capital(country: str) -> str:
    """Looks up the capital of a country.

    Args:
        country: Its English name.
    """
    if country not in CAPITALS:
        raise ToolError(f"there is no entry for {country}")
    return CAPITALS[country]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
