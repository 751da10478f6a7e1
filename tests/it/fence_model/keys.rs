//! Keys, and who is in whose way.

use std::fmt;

use super::design::TERMS;

/// A set of keys, each with the mode in which it is held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Keys(u16);

impl Keys {
    pub(crate) const LEASE: Self = Self(1);
    pub(crate) const LEASE_SHARED: Self = Self(1 << 1);
    pub(crate) const BARRIER_OF_WRITERS: Self = Self(1 << 2);
    pub(crate) const BARRIER_OF_READERS: Self = Self(1 << 3);
    pub(crate) const BARRIER_OF_READERS_SHARED: Self = Self(1 << 4);
    const FIRST_TERM: usize = 5;

    pub(crate) const ANY_LEASE: Self = Self(0b11);
    pub(crate) const BARRIERS: Self = Self(0b11100);
    pub(crate) const TERMS: Self = Self(((1 << TERMS) - 1) << Self::FIRST_TERM);

    pub(crate) const fn of_term(term: usize) -> Self {
        Self(1 << (term + Self::FIRST_TERM))
    }

    pub(crate) const fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub(crate) const fn meets(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    pub(crate) const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub(crate) const fn only(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    pub(crate) const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Each key by itself.
    pub(crate) fn each(self) -> impl Iterator<Item = Self> {
        (0..u16::BITS).map(|bit| Self(1 << bit)).filter(move |key| key.meets(self))
    }

    /// What in the hands of others keeps one from taking these.
    pub(crate) const fn conflicts(self) -> Self {
        match self {
            Self::LEASE => Self::ANY_LEASE,
            Self::LEASE_SHARED => Self::LEASE,
            Self::BARRIER_OF_READERS => Self(0b11000),
            Self::BARRIER_OF_READERS_SHARED => Self::BARRIER_OF_READERS,
            other => other,
        }
    }
}

impl fmt::Display for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, key) in self.each().enumerate() {
            let comma = if n == 0 { "" } else { ", " };
            match key {
                Self::LEASE => write!(f, "{comma}K")?,
                Self::LEASE_SHARED => write!(f, "{comma}K (shared)")?,
                Self::BARRIER_OF_WRITERS => write!(f, "{comma}Bw")?,
                Self::BARRIER_OF_READERS => write!(f, "{comma}Br")?,
                Self::BARRIER_OF_READERS_SHARED => write!(f, "{comma}Br (shared)")?,
                term => {
                    let number = (0..TERMS).find(|number| term == Self::of_term(*number));
                    write!(f, "{comma}T{}", number.map_or(0, |number| number + 1))?;
                }
            }
        }
        Ok(())
    }
}
