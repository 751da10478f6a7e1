//! Everybody who asks or holds, in the order in which they came.

use std::collections::BTreeMap;

use super::candidate::Candidate;
use crate::driver::command::Id;

/// Each one apart: the room that the map keeps for those to come is that of a pointer.
pub(super) struct Seats<H>(BTreeMap<Id, Box<Candidate<H>>>);

impl<H> Seats<H> {
    pub(super) const fn new() -> Self {
        Self(BTreeMap::new())
    }

    pub(super) fn insert(&mut self, candidate: Candidate<H>) {
        self.0.insert(candidate.place.id, Box::new(candidate));
    }

    pub(super) fn remove(&mut self, id: Id) -> Option<Candidate<H>> {
        self.0.remove(&id).map(|candidate| *candidate)
    }

    pub(super) fn retain(&mut self, stays: impl Fn(&Candidate<H>) -> bool) {
        self.0.retain(|_, candidate| stays(candidate));
    }

    pub(super) fn get(&self, id: Id) -> Option<&Candidate<H>> {
        self.0.get(&id).map(|candidate| &**candidate)
    }

    pub(super) fn get_mut(&mut self, id: Id) -> Option<&mut Candidate<H>> {
        self.0.get_mut(&id).map(|candidate| &mut **candidate)
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = Id> {
        self.0.keys().copied()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Id, &Candidate<H>)> {
        self.0.iter().map(|(id, candidate)| (*id, &**candidate))
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (Id, &mut Candidate<H>)> {
        self.0.iter_mut().map(|(id, candidate)| (*id, &mut **candidate))
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &Candidate<H>> {
        self.0.values().map(|candidate| &**candidate)
    }

    pub(super) fn values_mut(&mut self) -> impl Iterator<Item = &mut Candidate<H>> {
        self.0.values_mut().map(|candidate| &mut **candidate)
    }
}
