//! What the server does in one go. Every key that a script touches is declared, and all of one script are of one slot; what
//! varies is an argument. The clock is the server's.

use std::collections::HashMap;

use redis::{Arg, Cmd, Script, cmd};

/// Enters those who are not served into the queue, and tells those who wait. `now` in milliseconds: thirteen digits, which
/// Lua writes as they are.
const PRELUDE: &str = r"
local function now()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
-- A key with members of their own time to live, for as long as the last of them has.
local function put(key, member, life)
  local ends = now() + life
  redis.call('ZADD', key, ends, member)
  redis.call('PEXPIREAT', key, ends, redis.call('PTTL', key) < 0 and 'NX' or 'GT')
end
local function purge(key)
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now())
end
local function wake(queue, channel, message)
  if not queue or redis.call('EXISTS', queue) == 1 then redis.call('PUBLISH', channel, message) end
end
";

// What every lock passes through, `ACQUIRE`, `EXTEND` and `RELEASE`, does without the prelude: making its functions takes the
// server as long as one of its commands.

/// KEYS holder, queue; ARGV value, ttl, session, life. Who is refused waits in the queue.
const ACQUIRE: &str = r"
local by = redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2], 'GET')
if not by or by == ARGV[1] then
  redis.call('ZREM', KEYS[2], ARGV[3])
  return false
end
local time = redis.call('TIME')
redis.call('ZADD', KEYS[2], time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[4], ARGV[3])
if redis.call('PTTL', KEYS[2]) < tonumber(ARGV[4]) then redis.call('PEXPIRE', KEYS[2], ARGV[4]) end
return by
";

/// KEYS holder, queue, readers, intents; ARGV value, ttl, session, life, and 0: does not
/// wait, 1: waits, 2: waits, and keeps new readers out meanwhile.
const WRITE: &str = r"
purge(KEYS[3])
local by = redis.call('GET', KEYS[1])
if by == ARGV[1] then return false end
by = by or redis.call('ZRANGE', KEYS[3], 0, 0)[1]
if not by then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
  redis.call('ZREM', KEYS[2], ARGV[3])
  redis.call('ZREM', KEYS[4], ARGV[3])
  return false
end
if ARGV[5] ~= '0' then put(KEYS[2], ARGV[3], ARGV[4]) end
if ARGV[5] == '2' then put(KEYS[4], ARGV[3], ARGV[4]) end
return by
";

/// KEYS and ARGV as above. Who waits to write comes first.
const READ: &str = r"
purge(KEYS[3])
purge(KEYS[4])
local by = redis.call('GET', KEYS[1]) or redis.call('ZRANGE', KEYS[4], 0, 0)[1]
if not by or redis.call('ZSCORE', KEYS[3], ARGV[1]) then
  put(KEYS[3], ARGV[1], ARGV[2])
  redis.call('ZREM', KEYS[2], ARGV[3])
  return false
end
if ARGV[5] ~= '0' then put(KEYS[2], ARGV[3], ARGV[4]) end
return by
";

/// KEYS holder; ARGV value, ttl. Revives nothing.
const EXTEND: &str = r"
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
";

/// What is held is kept though the server's memory is full, too.
const WITHOUT_MEMORY: &str = "#!lua flags=allow-oom\n";

/// KEYS readers; ARGV value, ttl. It moves on its own reader and no other.
const EXTEND_READ: &str = r"
local ends = redis.call('ZSCORE', KEYS[1], ARGV[1])
if not ends or tonumber(ends) <= now() then return 0 end
put(KEYS[1], ARGV[1], ARGV[2])
return 1
";

/// KEYS holder, queue or nothing; ARGV value, channel, message.
const RELEASE: &str = r"
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
if not KEYS[2] or redis.call('EXISTS', KEYS[2]) == 1 then redis.call('PUBLISH', ARGV[2], ARGV[3]) end
return 1
";

/// KEYS readers, queue; ARGV value, channel, message.
const RELEASE_READ: &str = r"
local ends = redis.call('ZSCORE', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[1], ARGV[1])
purge(KEYS[1])
if redis.call('EXISTS', KEYS[1]) == 0 then wake(KEYS[2], ARGV[2], ARGV[3]) end
if ends and tonumber(ends) > now() then return 1 end
return 0
";

/// KEYS queue, intents or nothing; ARGV session, channel, message. Readers may come in who were kept out.
const WITHDRAW: &str = r"
redis.call('ZREM', KEYS[1], ARGV[1])
if KEYS[2] and redis.call('ZREM', KEYS[2], ARGV[1]) == 1 then wake(KEYS[1], ARGV[2], ARGV[3]) end
return 1
";

/// KEYS counter. False where it has something that is no counter. A double holds microseconds until the year 2255.
const MINT: &str = r"
local time = redis.call('TIME')
local token = time[1] * 1000000 + time[2]
local last = redis.call('GET', KEYS[1])
if last then
  if not string.find(last, '^%d+$') or tonumber(last) >= 2 ^ 53 then return false end
  token = math.max(token, last + 1)
end
token = string.format('%.0f', token)
redis.call('SET', KEYS[1], token)
return token
";

/// KEYS slots. The clock in microseconds, and the record or nothing.
const SLOTS: &str = r"
local time = redis.call('TIME')
return {string.format('%.0f', time[1] * 1000000 + time[2]), redis.call('GET', KEYS[1])}
";

/// KEYS holder, slots; ARGV value, the record that is expected or '', what comes before and after the time in the new one. Gives
/// the new one, false where there was another, and 0 where the lock is not held. Asked again, it says the same.
const AMEND: &str = r"
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
local line = redis.call('GET', KEYS[2]) or ''
if string.sub(line, 1, #ARGV[3]) == ARGV[3] and string.sub(line, -#ARGV[4]) == ARGV[4] then return line end
if line ~= ARGV[2] then return false end
local time = redis.call('TIME')
line = ARGV[3] .. string.format('%.0f', time[1] * 1000000 + time[2]) .. ARGV[4]
redis.call('SET', KEYS[2], line)
return line
";

/// KEYS holder, readers or nothing. Whose it is, and for how many milliseconds yet.
const WHO: &str = r"
local by = redis.call('GET', KEYS[1])
if by then return {by, redis.call('PTTL', KEYS[1])} end
if not KEYS[2] then return false end
local last = redis.call('ZRANGE', KEYS[2], 0, 0, 'REV', 'WITHSCORES')
if not last[1] or tonumber(last[2]) <= now() then return false end
return {last[1], last[2] - now()}
";

/// All of them. Their digests are computed once for each store.
pub(super) struct Scripts {
    pub(super) acquire: Script,
    pub(super) write: Script,
    pub(super) read: Script,
    pub(super) extend: Script,
    pub(super) extend_read: Script,
    pub(super) release: Script,
    pub(super) release_read: Script,
    pub(super) withdraw: Script,
    pub(super) mint: Script,
    pub(super) slots: Script,
    pub(super) amend: Script,
    pub(super) who: Script,
    /// What each is, by its digest.
    bodies: HashMap<String, String>,
}

impl Scripts {
    pub(super) fn new() -> Self {
        let mut bodies = HashMap::new();
        let mut plain = |body: String| {
            let script = Script::new(&body);
            bodies.insert(script.get_hash().to_owned(), body);
            script
        };
        let acquire = plain(ACQUIRE.to_owned());
        let release = plain(RELEASE.to_owned());
        let mint = plain(MINT.to_owned());
        let extend = plain(EXTEND.to_owned());
        let slots = plain(SLOTS.to_owned());
        let amend = plain(AMEND.to_owned());
        let extend_read = plain(format!("{WITHOUT_MEMORY}{PRELUDE}{EXTEND_READ}"));
        let mut script = |body: &str| plain(format!("{PRELUDE}{body}"));
        Self {
            acquire,
            write: script(WRITE),
            read: script(READ),
            extend,
            extend_read,
            release,
            release_read: script(RELEASE_READ),
            withdraw: script(WITHDRAW),
            mint,
            slots,
            amend,
            who: script(WHO),
            bodies,
        }
    }

    /// Makes the server know all of them; in a cluster, every node.
    pub(super) fn loading(&self) -> impl Iterator<Item = Cmd> {
        self.bodies.values().map(|body| {
            let mut load = cmd("SCRIPT");
            load.arg("LOAD").arg(body);
            load
        })
    }

    /// The same call, with the script itself instead of its digest: no server forgets that. None for what calls none.
    pub(super) fn in_full(&self, call: &Cmd) -> Option<Cmd> {
        let mut words = call.args_iter().filter_map(|word| match word {
            Arg::Simple(word) => Some(word),
            _ => None,
        });
        words.next().filter(|name| *name == b"EVALSHA")?;
        let body = self.bodies.get(std::str::from_utf8(words.next()?).ok()?)?;
        let mut full = cmd("EVAL");
        full.arg(body);
        for word in words {
            full.arg(word);
        }
        Some(full)
    }
}
