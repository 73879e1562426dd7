"""What people write first: the model called inside the request handler of an aiohttp server."""

from __future__ import annotations

import work
from aiohttp import web

NET = work.set_up()


async def predict(request: web.Request) -> web.Response:
    return web.json_response(work.answer(NET, await request.read()))


if __name__ == "__main__":
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/predict", predict)
    web.run_app(app, host="127.0.0.1", port=work.PORT, access_log=None, print=None)
