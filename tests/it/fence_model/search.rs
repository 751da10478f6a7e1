//! The search: breadth first over all states, so that what it finds is found by a shortest way.

use std::collections::hash_map::{Entry, HashMap};
use std::collections::{BTreeMap, HashSet};
use std::fmt::Write as _;
use std::hash::{BuildHasherDefault, Hasher};

use super::design::Design;
use super::protocol::{Fault, State};
use super::step::{Kind, Step};

/// What a search has found.
pub(crate) struct Found {
    pub(crate) states: usize,
    pub(crate) taken: BTreeMap<Kind, usize>,
    /// The first fault, and how it comes to it.
    pub(crate) fault: Option<(Fault, String)>,
    /// A state out of which a candidate that is left alone never gets to start, and how it comes to it.
    pub(crate) stuck: Option<String>,
}

/// Visits every state, or up to the first of the faults that are looked for.
pub(crate) fn search(design: Design, faults: &[Fault]) -> Found {
    let mut states = vec![State::default()];
    let mut parents = vec![0];
    let mut numbers: HashMap<State, usize, Quick> = HashMap::from_iter([(State::default(), 0)]);
    let mut taken = BTreeMap::new();
    let mut left_alone = HashSet::new();
    let mut stuck = None;
    let mut number = 0;
    while let Some(state) = states.get(number).copied() {
        for one in State::sessions() {
            let left = [Some(state.with_only(one)), state.with_only_and_a_reader(one)];
            for left in left.into_iter().flatten() {
                if stuck.is_none() && left_alone.insert(left) && !left.gets_to_start(design) {
                    stuck = Some(number);
                }
            }
        }
        for next in state.moves(design) {
            *taken.entry(next.step.kind).or_default() += 1;
            let to = next.to.in_order();
            if let Some(fault) = next.fault.filter(|fault| faults.contains(fault)) {
                let way = trace(design, &way(&parents, &states, number), Some((next.step.kind, fault)));
                return Found { states: states.len(), taken, fault: Some((fault, way)), stuck: None };
            }
            if let Entry::Vacant(vacant) = numbers.entry(to) {
                vacant.insert(states.len());
                states.push(to);
                parents.push(number);
            }
        }
        number += 1;
    }
    let stuck = stuck.map(|number| trace(design, &way(&parents, &states, number), None));
    Found { states: states.len(), taken, fault: None, stuck }
}

/// The states on the way to one of them, without the first.
fn way(parents: &[usize], states: &[State], to: usize) -> Vec<State> {
    let numbers = std::iter::successors(Some(to), |number| Some(parents[*number]));
    let mut way: Vec<State> =
        numbers.take_while(|number| *number != 0).map(|number| states[number]).collect();
    way.reverse();
    way
}

/// Walks it once more, with sessions and transactions that keep their names, and writes it down; at its end a step of
/// the last kind, which is at fault.
fn trace(design: Design, way: &[State], last: Option<(Kind, Fault)>) -> String {
    let mut state = State::default();
    let mut lines = String::new();
    let mut line = |number: usize, step: Step| writeln!(lines, "{number:>4}. {step}").unwrap();
    for (number, next) in way.iter().enumerate() {
        let moves = state.moves(design);
        let step = moves.into_iter().find(|it| it.to.in_order() == *next).expect("a step leads there");
        line(number + 1, step.step);
        state = step.to;
    }
    if let Some((kind, fault)) = last {
        let moves = state.moves(design);
        let step = moves.into_iter().find(|it| it.step.kind == kind && it.fault == Some(fault));
        line(way.len() + 1, step.expect("a step is at fault").step);
    }
    lines
}

type Quick = BuildHasherDefault<Mix>;

/// The hash of rustc, which is quick also where it is not optimised; nobody chooses states to collide.
#[derive(Default)]
struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u8(&mut self, number: u8) {
        self.write_u64(u64::from(number));
    }

    fn write_u16(&mut self, number: u16) {
        self.write_u64(u64::from(number));
    }

    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }

    fn write_isize(&mut self, number: isize) {
        self.write_usize(number.cast_unsigned());
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0.rotate_left(5) ^ number).wrapping_mul(0x517c_c1b7_2722_0a95);
    }
}
