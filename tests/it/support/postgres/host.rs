//! A host of its own, as far as the network goes, which can vanish without a word: a network namespace, and a cable (a
//! pair of virtual interfaces) from it to the host of the tests.
//!
//! Making one takes Linux, and a root that may: in a container that takes more than the usual rights. Where it cannot be
//! made the tests fail and say what to do. Who sets the variable `LEASEHOLD_TEST_WITHOUT_ROOT` does without: then they
//! print that they did not run. `scripts/test` sets it for those who are not root, and says so.
//!
//! Nothing is left behind: the namespace has no name, and is gone with its last process, the cable with it. One process
//! is there for that alone, and ends with its standard input, so also when the test process is killed.

use std::env;
use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

use rustix::process::geteuid;

use super::super::programs;
use super::Cluster;

/// The network for tests of devices (RFC 2544), which nobody uses for anything else: 198.18.0.0/15.
const NETWORK: &str = "198.18";

/// Begins the name of a cable's end at this host. At most 15 bytes with the number.
const INTERFACE: &str = "leasehold";

const OR_ELSE: &str = "or set LEASEHOLD_TEST_WITHOUT_ROOT=1, and do without the tests of such hosts";

pub(crate) struct RemoteHost {
    /// Holds the namespace open until its standard input is closed.
    keeper: Child,
    /// Of its cable; tells it apart from the other hosts on this machine.
    number: u8,
}

impl RemoteHost {
    /// A host with a cable to this one. `None`, which is printed, where there is to be none.
    ///
    /// # Panics
    ///
    /// Where it cannot be made, with what to do.
    pub(crate) fn new() -> Option<Self> {
        if !cfg!(target_os = "linux") || env::var_os("LEASEHOLD_TEST_WITHOUT_ROOT").is_some() {
            println!("NOT RUN: hosts that vanish are for Linux, and for root");
            return None;
        }
        assert!(
            geteuid().is_root(),
            "a host that can vanish is made by root: run the tests as root, {OR_ELSE}"
        );
        let mut keeper = Command::new("unshare")
            .args(["--net", "sh", "-c", "echo ready; read -r _"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("unshare, of util-linux, starts");
        let mut ready = String::new();
        BufReader::new(keeper.stdout.take().unwrap()).read_line(&mut ready).unwrap();
        assert_eq!(
            ready, "ready\n",
            "root may make no network namespace here: give the container the right to (--privileged), {OR_ELSE}"
        );
        let pid = keeper.id();
        // Who is first has the number: the kernel knows each interface once.
        let mut numbers = (0..=u8::MAX).map(|n| n.wrapping_add(pid.to_le_bytes()[0]));
        let number = numbers.find(|&number| {
            let cable = format!("link add {INTERFACE}{number} type veth peer name eth0 netns {pid}");
            let output = ip(&cable).output().expect("ip is there: run scripts/install-test-servers");
            let error = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success() || error.contains("File exists"), "{cable}: {error}");
            output.status.success()
        });
        let host = Self { keeper, number: number.expect("one of 256 numbers is free") };
        programs::run(&mut ip(&format!("addr add {}/30 dev {}", host.gateway(), host.interface())));
        programs::run(&mut ip(&format!("link set {} up", host.interface())));
        let address = format!("addr add {}/30 dev eth0", host.address());
        for inside in [&address, "link set eth0 up", "link set lo up"] {
            programs::run(host.command("ip").args(inside.split(' ')));
        }
        Some(host)
    }

    /// The address of the tests' own host, as seen from this one.
    fn gateway(&self) -> String {
        format!("{NETWORK}.{}.1", self.number)
    }

    /// Its own address.
    pub(crate) fn address(&self) -> String {
        format!("{NETWORK}.{}.2", self.number)
    }

    /// The end of its cable at the tests' own host.
    pub(crate) fn interface(&self) -> String {
        format!("{INTERFACE}{}", self.number)
    }

    /// A server's URL for programs on it.
    pub(crate) fn url(&self, cluster: &Cluster) -> String {
        format!("postgres://postgres@{}:{}/postgres", self.gateway(), cluster.port())
    }

    /// The setting of a server that is to be reached from it.
    pub(crate) fn listen_addresses(&self) -> String {
        format!("listen_addresses=127.0.0.1,{}", self.gateway())
    }

    /// A command that runs a program on it, as the same process.
    pub(crate) fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/proc/{}/ns/net", self.keeper.id())).arg(program);
        command
    }

    /// From now on nothing comes in and nothing goes out, and nobody is told.
    pub(crate) fn vanish(&self) {
        self.nft(
            "add table inet vanished { \
             chain in { type filter hook input priority 0; iifname != \"lo\" drop; }; \
             chain out { type filter hook output priority 0; oifname != \"lo\" drop; }; }",
        );
    }

    pub(crate) fn reappear(&self) {
        self.nft("delete table inet vanished");
    }

    #[track_caller]
    fn nft(&self, rules: &str) {
        programs::run(self.command("nft").arg(rules));
    }
}

impl Drop for RemoteHost {
    fn drop(&mut self) {
        self.keeper.stdin.take();
        self.keeper.wait().ok();
    }
}

fn ip(arguments: &str) -> Command {
    let mut command = Command::new("ip");
    command.env("LC_ALL", "C").args(arguments.split(' '));
    command
}
