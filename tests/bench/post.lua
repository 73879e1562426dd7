-- wrk's script: POST the file $BENCH_BODY as $BENCH_TYPE, and print the summary as one JSON line.
local file = assert(io.open(os.getenv("BENCH_BODY"), "rb"))
wrk.method = "POST"
wrk.body = file:read("*a")
wrk.headers["Content-Type"] = os.getenv("BENCH_TYPE")
file:close()

function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format(
    'JSON {"requests":%d,"duration_us":%d,"connect":%d,"read":%d,"write":%d,"status":%d,"timeout":%d,' ..
    '"p50_us":%.1f,"p99_us":%.1f,"max_us":%.1f}\n',
    summary.requests, summary.duration,
    errors.connect, errors.read, errors.write, errors.status, errors.timeout,
    latency:percentile(50), latency:percentile(99), latency.max))
end
