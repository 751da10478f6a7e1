//! What is kept of the slots of `every`: a line under a key beside that of the lock.

use redis::Value;

use super::calls::calling;
use super::exchange::acknowledged;
use super::{RedisSession, foreign_key};
use crate::name::Kind;
use crate::redis::Layout;
use crate::store::redis::Common;
use crate::store::redis::grant::Held;
use crate::store::redis::keys::Keys;
use crate::store::redis::refusal::Meaning;
use crate::store::slots::{Amended, Entry, Looked, Moment, NoSlots, Record, Slots};

impl RedisSession {
    pub(super) async fn look_at_slots(&mut self, slots: &Slots) -> Result<Looked, NoSlots> {
        let layout = self.common.config.target.layout;
        let key = slots_key(layout, slots)?;
        let asking = calling(&self.common.scripts.slots, [&key]);
        match self.carry_out([asking], false).await.replies.pop() {
            Some(Ok(told)) => read_look(told).ok_or_else(|| NoSlots::Failed(foreign_key(&key))),
            Some(Err(refusal)) if refusal.meaning() == Meaning::Foreign => {
                Err(NoSlots::Forbidden(foreign_key(&key)))
            }
            Some(Err(refusal)) => Err(NoSlots::Failed(refusal.told())),
            None => Err(NoSlots::Failed("the server did not answer".to_owned())),
        }
    }

    pub(super) async fn amend_slots(
        &mut self,
        held: &Held,
        slots: &Slots,
        expected: Option<&Record>,
        next: &Entry,
    ) -> Amended {
        let Common { config, scripts, .. } = &*self.common;
        let key = match slots_key(config.target.layout, slots) {
            Ok(key) => key,
            Err(why) => return Amended::Failed(why),
        };
        let Entry { number, at, run, phase, by } = next;
        let expected = expected.map(Record::to_string).unwrap_or_default();
        let mut amending = calling(&scripts.amend, [&held.keys.holder, &key]);
        amending.arg(&*held.value).arg(expected);
        amending
            .arg(format!("slot {number} of {} run {run} {} ", at.0, phase.word()))
            .arg(format!(" by {by}"));
        let replicas = config.target.replicas;
        let mut commands = vec![amending];
        commands.extend((replicas > 0).then(|| self.waiting_for_replicas()));
        let mut replies = self.carry_out(commands, false).await.replies.into_iter();
        let failed = |why: String| Amended::Failed(NoSlots::Failed(why));
        let amended = match replies.next() {
            Some(Ok(Value::Int(0))) => Amended::Gone,
            Some(Ok(Value::Nil)) => Amended::Changed,
            Some(Ok(Value::BulkString(line))) => match read_record(line) {
                Some(record) => Amended::Done(record),
                None => failed(foreign_key(&key)),
            },
            Some(Err(refusal)) => failed(refusal.told()),
            _ => failed("the server did not answer".to_owned()),
        };
        match (amended, acknowledged(replies.next())) {
            (Amended::Done(_), count) if count < i64::from(replicas) => {
                failed(format!("{count} of {replicas} replicas acknowledged the slot in time"))
            }
            (amended, _) => amended,
        }
    }
}

fn slots_key(layout: Layout, slots: &Slots) -> Result<Vec<u8>, NoSlots> {
    let keys = Keys::of(layout, Kind::Lock, &slots.name).map_err(NoSlots::Forbidden)?;
    keys.slots.ok_or_else(|| {
        NoSlots::Forbidden("wakuwaku's layout has no slots: use a name that is in no scope".to_owned())
    })
}

fn read_look(told: Value) -> Option<Looked> {
    let Value::Array(parts) = told else { return None };
    let [Value::BulkString(now), record] = <[Value; 2]>::try_from(parts).ok()? else { return None };
    let now = Moment(String::from_utf8(now).ok()?.parse().ok()?);
    let record = match record {
        Value::Nil => None,
        Value::BulkString(line) => Some(read_record(line)?),
        _ => return None,
    };
    Some(Looked { now, record })
}

fn read_record(line: Vec<u8>) -> Option<Record> {
    String::from_utf8(line).ok()?.parse().ok()
}
