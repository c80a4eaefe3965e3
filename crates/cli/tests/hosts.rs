//! `paceline run --hosts`: through a stand-in for ssh, whose hosts are all this machine, and through real sshds in network namespaces.

#[path = "schedulers/support.rs"]
mod support;

use std::path::Path;
use std::process::Command;

use support::{Ended, Site, has};

/// ssh's options, the host, and then the command, which a shell runs here. Hosts differ in what is wrong with them.
const SSH: &str = r#"
while [[ $1 == -* ]]; do [[ $1 == -o ]] && shift; shift; done
host=${1#*@}; shift
say() { echo "$1" >&2; exit 255; }
swap() { exec sh -c "$command" < <(sed -u "1s|\"$1\":\"[^\"]*\"|\"$1\":\"$2\"|"); }
command=$*
echo "Welcome to $host!"
case $host in
    closed) say "ssh: connect to host closed port 22: Connection refused" ;;
    locked) say "me@locked: Permission denied (publickey,password)." ;;
    new) echo "No ED25519 host key is known for new." >&2; say "Host key verification failed." ;;
    silent) echo $$ > silent; exec sleep 100 ;;
    bare) exec "$PWD/no/paceline" ;;
    old) swap version 0.0.1 ;;
    away) swap folder /not/there ;;
    poor) PATH=/usr/bin:/bin ;;
esac
export SSH_CONNECTION="127.0.0.1 40000 127.0.0.1 22"
exec sh -c "$command"
"#;

/// Says where it is, whether others can see the token, and what its arguments are.
const RANK: &str = r#"
launcher=$PPID
all=$(cat /proc/[0-9]*/cmdline /proc/$launcher/environ 2> /dev/null | tr '\0' ' ')
[[ $all == *"$PACELINE_JOB_TOKEN"* ]] && shown=yes || shown=no
echo "at $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE on $GROUP_RANK $PACELINE_HOST_ID, token shown $shown"
printf '<%s>' "$@"; echo " in $PWD"
[[ $1 == fail* && $RANK == 1 ]] && { echo out of disk >&2; exit 7; }
if [[ $1 == stay ]]; then
    trap 'echo told to stop; exit 0' TERM
    echo "$$ $launcher" > "here.$RANK"
    while :; do sleep 0.05; done
fi
"#;

fn site() -> Site {
    let site = Site::new(RANK);
    site.script("ssh.sh", SSH);
    site
}

/// `paceline run` with these words.
fn run(site: &Site, words: &str) -> Ended {
    let line = format!("PACELINE_SSH=./ssh.sh $LAUNCHER run --log-dir /dev/null {words}");
    site.run(&[], &line)
}

/// What a job of two ranks on two hosts comes to when `strike` is done to the launcher, `$!`; then all of it is waited for.
fn struck(site: &Site, strike: &str) -> Ended {
    let line = format!(
        "PACELINE_SSH=./ssh.sh $LAUNCHER run --log-dir /dev/null --shutdown-timeout 5 --hosts a:1,b:1 ./rank.sh stay &
        until [[ -e here.0 && -e here.1 ]]; do sleep 0.02; done
        {strike}
        wait $!; code=$?
        for pid in $(cat here.*); do while grep -qs '^State:.[^ZX]' /proc/$pid/status; do sleep 0.02; done; done
        exit $code"
    );
    site.run(&[], &line)
}

#[test]
fn a_job_runs_on_all_hosts_with_its_arguments_and_its_token_is_seen_by_nobody() {
    let site = site();
    let words = r#"--hosts a:2,me@b:1 ./rank.sh 'two  words' "it's \$HOME" '*' ''"#;
    let ended = run(&site, words);
    ended
        .ends_with(0)
        .says("note: 3 ranks on 2 hosts: a (2), b (1)");
    let expect = [
        "at 0 of 3, 0 of 2 on 0 a, token shown no",
        "at 1 of 3, 1 of 2 on 0 a, token shown no",
        "at 2 of 3, 0 of 1 on 1 b, token shown no",
    ];
    assert_eq!(ended.ranks(), expect, "{ended:?}");
    let folder = site.path().display();
    let line = format!("[rank 2] <two  words><it's $HOME><*><> in {folder}");
    assert!(
        ended.out.lines().any(|other| other == line),
        "no {line} in {ended:?}"
    );
    assert!(!ended.out.contains("Welcome"), "{ended:?}");
}

#[test]
fn one_host_of_a_file_is_a_job_of_its_own() {
    let site = site();
    std::fs::write(site.path().join("hosts"), "# ours\na slots=2\n").expect("written");
    let ended = run(&site, "--hostfile hosts --nproc-per-node 1 ./rank.sh");
    ended.ends_with(0);
    assert_eq!(ended.ranks(), ["at 0 of 1, 0 of 1 on 0 a, token shown no"]);
    std::fs::write(site.path().join("hosts"), "a slots=2\nb slots=two\n").expect("written");
    let wrong = run(&site, "--hostfile hosts ./rank.sh");
    wrong
        .ends_with(2)
        .says("hosts:2: \"two\" is no number of ranks");
}

#[test]
fn the_failure_of_a_rank_is_reported_once_and_its_code_is_the_jobs() {
    let ended = run(&site(), "--hosts a:1,b:1 ./rank.sh fail");
    ended
        .ends_with(7)
        .says("error: rank 1 (node 1, host b, pid ");
    for text in ["error: ", "exited with code 7"] {
        assert_eq!(ended.err.matches(text).count(), 1, "{ended:?}");
    }
}

#[test]
fn what_is_wrong_with_each_host_is_said_and_nothing_is_left() {
    let site = site();
    // Not in the PATH of every host.
    std::fs::create_dir(site.path().join("bin")).expect("made");
    site.script("bin/mine", "touch started");
    let hosts = "--hosts a,closed,locked,new,silent,bare,old,away,poor --nproc-per-node 1";
    let line = format!(
        "export PATH=$PWD/bin:$PATH; PACELINE_SSH=./ssh.sh $LAUNCHER run --rdzv-conf join_timeout=5 {hosts} mine"
    );
    let ended = site.run(&[], &line);
    ended
        .says("error: closed: ssh: connect to host closed port 22: Connection refused")
        .says("error: locked: me@locked: Permission denied")
        .says("`ssh-copy-id locked` brings a key there")
        .says("error: new: Host key verification failed.")
        .says("`ssh new` once by hand shows it and asks")
        .says("error: silent: no answer in time")
        .says("error: bare: paceline is not there")
        .says("error: old: paceline is version ")
        .says("error: away: the folder /not/there cannot be entered")
        .says("error: poor: program `mine` ")
        .says("error: 8 of 9 hosts cannot take part; nothing was started")
        .ends_with(3);
    assert!(!site.path().join("started").exists());
    let gone = site.run(
        &[],
        "! grep -qs '^State:.[^ZX]' /proc/$(cat silent)/status && ! pgrep -f -- '[-]-stdin=none -- mine'",
    );
    gone.ends_with(0);
}

#[test]
fn a_signal_stops_the_ranks_of_all_hosts_in_order() {
    let ended = struck(&site(), "kill -TERM $!");
    ended.ends_with(128 + 15);
    assert_eq!(ended.out.matches("told to stop").count(), 2, "{ended:?}");
}

#[test]
fn a_killed_launcher_leaves_no_process_on_any_host() {
    struck(&site(), "kill -KILL $!").ends_with(128 + 9);
}

#[test]
fn the_loss_of_one_connection_ends_the_job_everywhere_and_is_said() {
    // The launcher on b, as when its machine goes down.
    let ended = struck(&site(), "kill -KILL $(cut -d' ' -f2 here.1)");
    ended.says("error: b: the connection or the launcher was lost");
    assert_ne!(ended.code, Some(0), "{ended:?}");
}

/// Two hosts with a cable between them, and an sshd on each. Gone when dropped.
struct Network(String);

impl Network {
    /// `None` where this user may not, or a program is missing.
    fn new(folder: &Path) -> Option<Self> {
        let network = Self(format!("ps{}", std::process::id()));
        let script = r#"
            set -e
            ip netns add ${p}a; ip netns add ${p}b
            ip link add eth0 netns ${p}a type veth peer name eth0 netns ${p}b
            ssh-keygen -q -t ed25519 -N '' -f key; ssh-keygen -q -t ed25519 -N '' -f host
            cp key.pub known; chmod 600 known; mkdir -p /run/sshd
            printf '%s\n' 'PermitRootLogin yes' 'StrictModes no' 'UsePAM no' 'PidFile none' \
                "HostKey $PWD/host" "AuthorizedKeysFile $PWD/known" > sshd.conf
            for number in 1 2; do
                name=$(echo ab | cut -c$number)
                ip -n $p$name link set lo up; ip -n $p$name link set eth0 up
                ip -n $p$name addr add 10.79.0.$number/24 dev eth0
                ip netns exec $p$name $(command -v sshd) -f "$PWD/sshd.conf" -E "$PWD/sshd.$name"
                echo "10.79.0.$number $(cut -d' ' -f1,2 host.pub)" >> known_hosts
                printf 'Host %s\n HostName 10.79.0.%s\n IdentityFile %s/key\n UserKnownHostsFile %s/known_hosts\n' \
                    $name $number "$PWD" "$PWD" >> config
            done"#;
        let made = Command::new("bash")
            .args(["-c", script])
            .env("p", &network.0)
            .env(
                "PATH",
                format!("{}:/usr/sbin", std::env::var("PATH").unwrap_or_default()),
            )
            .current_dir(folder)
            .status();
        made.is_ok_and(|status| status.success()).then_some(network)
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        let script = "for ns in ${p}a ${p}b; do kill $(ip netns pids $ns); ip netns del $ns; done 2> /dev/null";
        let _ = Command::new("bash")
            .args(["-c", script])
            .env("p", &self.0)
            .status();
    }
}

#[test]
fn real_sshds_start_the_job_and_refuse_a_host_without_a_key() {
    if !has(&["sshd", "ssh"], "apt-get install openssh-server") {
        return;
    }
    let site = site();
    let Some(network) = Network::new(site.path()) else {
        paceline_testing::skipped("this user may not make network namespaces, or `ip` is missing");
        return;
    };
    let inside = format!("{}a", network.0);
    let behind = ["ip", "netns", "exec", &inside];
    let run = |words: &str| {
        let line =
            format!("$LAUNCHER run --log-dir /dev/null --ssh \"ssh -F $PWD/config\" {words}");
        site.run(&behind, &line)
    };
    // The names are ssh's alone, and the launchers find each other nevertheless.
    let ended = run(r#"--hosts a:2,b:1 ./rank.sh "it's" '  '"#);
    ended.ends_with(0);
    assert_eq!(ended.ranks().len(), 3, "{ended:?}");
    assert!(ended.out.contains("[rank 2] <it's><  > in "), "{ended:?}");
    assert_eq!(ended.out.matches("token shown no").count(), 3, "{ended:?}");
    run("--hosts a:1,b:1 ./rank.sh fail").ends_with(7);
    let killed = r#"$LAUNCHER run --log-dir /dev/null --ssh "ssh -F $PWD/config" --hosts a:1,b:1 ./rank.sh stay &
        until [[ -e here.0 && -e here.1 ]]; do sleep 0.02; done
        kill -KILL $!
        for pid in $(cat here.*); do while grep -qs '^State:.[^ZX]' /proc/$pid/status; do sleep 0.02; done; done"#;
    site.run(&behind, killed).ends_with(0);
    std::fs::write(site.path().join("known"), "").expect("written");
    run("--hosts a,b ./rank.sh")
        .ends_with(3)
        .says("error: a: ")
        .says("Permission denied (publickey")
        .says("2 of 2 hosts cannot take part");
    std::fs::write(site.path().join("known_hosts"), "").expect("written");
    run("--hosts a ./rank.sh")
        .ends_with(3)
        .says("Host key verification failed.");
}
