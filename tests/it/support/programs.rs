//! Where the servers' programs are, and as whom they run.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::net::TcpListener;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::geteuid;
use tempfile::TempDir;

/// Finds a program of the PostgreSQL server: in `LEASEHOLD_TEST_PG_BIN`, else on the PATH, else where Debian's
/// packages and Homebrew put it, the newest version first.
pub(super) fn postgres(program: &str) -> PathBuf {
    if let Some(dir) = env::var_os("LEASEHOLD_TEST_PG_BIN") {
        let path = Path::new(&dir).join(program);
        assert!(path.is_file(), "there is no {program} in LEASEHOLD_TEST_PG_BIN={}", dir.display());
        return path;
    }
    // The link on the PATH may be to one program of many.
    let linked =
        on_the_path("postgres").and_then(|path| Some(path.canonicalize().ok()?.parent()?.to_owned()));
    let mut dirs = linked.into_iter().chain(installed_versions()).map(|dir| dir.join(program));
    dirs.find(|path| path.is_file()).unwrap_or_else(|| {
        panic!(
            "PostgreSQL's {program} is not to be found: run scripts/install-test-servers, or name its \
                 directory in LEASEHOLD_TEST_PG_BIN (looked there, on the PATH, in /usr/lib/postgresql/*/bin)"
        )
    })
}

/// Finds `PgBouncer`, which Debian puts beside the daemons.
pub(super) fn pgbouncer() -> PathBuf {
    let beside =
        ["/usr/sbin", "/opt/homebrew/bin", "/usr/local/bin"].map(|dir| Path::new(dir).join("pgbouncer"));
    on_the_path("pgbouncer")
        .or_else(|| beside.into_iter().find(|path| path.is_file()))
        .expect("PgBouncer is not to be found on the PATH or in /usr/sbin: run scripts/install-test-servers")
}

/// Finds the Redis server: in `LEASEHOLD_TEST_REDIS`, which may be one of Valkey, else on the PATH, else where Homebrew
/// puts it.
#[cfg(feature = "redis")]
pub(super) fn redis() -> PathBuf {
    if let Some(path) = env::var_os("LEASEHOLD_TEST_REDIS") {
        assert!(Path::new(&path).is_file(), "LEASEHOLD_TEST_REDIS={} is no program", path.display());
        return path.into();
    }
    let brewed = ["/opt/homebrew/bin", "/usr/local/bin"].map(|dir| Path::new(dir).join("redis-server"));
    on_the_path("redis-server").or_else(|| brewed.into_iter().find(|path| path.is_file())).expect(
        "redis-server is not to be found on the PATH: run scripts/install-test-servers, or name the program in \
         LEASEHOLD_TEST_REDIS",
    )
}

fn on_the_path(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).map(|dir| dir.join(program)).find(|path| path.is_file())
}

fn installed_versions() -> Vec<PathBuf> {
    let below = |dir: &'static str, prefix: &'static str| {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        entries.filter_map(move |entry| {
            let name = entry.file_name();
            let version: u32 = name.to_str()?.strip_prefix(prefix)?.parse().ok()?;
            Some((version, entry.path().join("bin")))
        })
    };
    let mut found: Vec<_> = below("/usr/lib/postgresql", "")
        .chain(below("/opt/homebrew/opt", "postgresql@"))
        .chain(below("/usr/local/opt", "postgresql@"))
        .collect();
    found.sort_by_key(|(version, _)| std::cmp::Reverse(*version));
    found.into_iter().map(|(_, dir)| dir).collect()
}

/// Whom the servers run as, where the tests run as root: they refuse to.
fn other_user() -> Option<(u32, u32)> {
    if !geteuid().is_root() {
        return None;
    }
    let users = fs::read_to_string("/etc/passwd").expect("/etc/passwd can be read");
    let ids = ["postgres", "nobody"].into_iter().find_map(|user| {
        let line = users.lines().find(|line| line.split(':').next() == Some(user))?;
        let mut ids = line.split(':').skip(2).map(str::parse);
        Some((ids.next()?.ok()?, ids.next()?.ok()?))
    });
    Some(ids.expect("there is a user postgres or nobody, since servers do not run as root"))
}

/// A command that runs as the servers do, out of the reach of the signals to the tests' process group.
pub(super) fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.process_group(0).current_dir("/").env("LC_ALL", "C").env("TZ", "UTC");
    for (name, _) in env::vars_os() {
        if name.to_str().is_some_and(|name| name.starts_with("PG")) {
            command.env_remove(name);
        }
    }
    if let Some((user, group)) = other_user() {
        // Without the other groups of root, too: the standard library drops them.
        command.uid(user).gid(group);
    }
    command
}

/// A port that was free just now.
pub(super) fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").expect("a free port").local_addr().unwrap().port()
}

/// Makes a certificate for `localhost` that is its own authority, and its key, which only the servers' user can read.
#[cfg(feature = "tls")]
pub(super) fn certificate(key: &Path, certificate: &Path) {
    let mut made = command("openssl");
    made.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]);
    made.args(["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]);
    made.args(["-addext", "basicConstraints=critical,CA:FALSE", "-keyout"]).arg(key);
    run(made.arg("-out").arg(certificate));
}

/// Runs a command to its end; it must succeed.
#[track_caller]
pub(super) fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?} does not start: {error}"));
    assert!(
        output.status.success(),
        "{command:?} failed, {}:\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
}

/// A temporary folder of the servers' user. Its path is short: a socket's path has at most 107 bytes.
pub(super) fn folder() -> TempDir {
    let dir = tempfile::Builder::new().prefix("lh-").rand_bytes(8).tempdir().expect("a temporary folder");
    give_away(dir.path());
    dir
}

/// Makes a file of the servers' user.
pub(super) fn write(path: &Path, text: &str) {
    fs::write(path, text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    give_away(path);
}

fn give_away(path: &Path) {
    if let Some((user, group)) = other_user() {
        std::os::unix::fs::chown(path, Some(user), Some(group)).expect("it can be given away");
    }
}
