-- ended: which of these jobs have ended, and how; how many of the others run.
--
-- KEYS     job hashes
-- ARGV[3]  most bytes of results in one reply; the jobs behind are left for the next call
-- Returns {running, waiting, output tokens logged by those, then for every ended job: a list of its
--          index in KEYS, state ('': no such job), result, error code, error message, attempt, claimed ms, ended ms}
-- If it never runs: nothing changed.

local room, running, waiting, tokens = tonumber(ARGV[3]), 0, 0, 0
local reply = { 0, 0, 0 }

for i, key in ipairs(KEYS) do
  local job = fields(key, 'state', 'offset')
  if job.state == 'running' or job.state == 'waiting' then
    tokens = tokens + tonumber(job.offset)
    if job.state == 'running' then running = running + 1 else waiting = waiting + 1 end
  elseif room > 0 then
    local end_of = fields(key, 'result', 'error_code', 'error_message', 'attempt', 'claimed', 'ended')
    room = room - #(end_of.result or '')
    reply[#reply + 1] = { i, job.state or '', end_of.result or '', end_of.error_code or '',
      end_of.error_message or '', tonumber(end_of.attempt or 0), tonumber(end_of.claimed or 0),
      tonumber(end_of.ended or 0) }
  end
end

reply[1], reply[2], reply[3] = running, waiting, tokens
return reply
