//! Containers and virtual machines around this process, as far as they show.

use super::{CHARS_MAX, line, text};
use crate::host::Host;
use paceline_words::plain;

/// Files of control groups, and the first processor in `/proc/cpuinfo`.
const BYTES_MAX: u64 = 16 << 10;

/// Containers, then virtual machines; each once.
pub(super) fn read(host: &Host<'_>) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    let mut add = |name: &str| {
        if !found.iter().any(|known| known == name) {
            found.push(name.to_owned());
        }
    };
    let groups = ["/proc/self/cgroup", "/proc/1/cgroup"];
    let groups = groups.map(|path| text(host, path, BYTES_MAX).unwrap_or_default());
    for name in containers(host, &groups.concat()) {
        add(&name);
    }
    if let Some(name) = machine(host) {
        add(name);
    }
    found
}

fn containers(host: &Host<'_>, groups: &str) -> Vec<String> {
    // What a container's control group is called by what made it.
    let is_in = |marks: &[&str]| marks.iter().any(|mark| groups.contains(mark));
    let set = |name: &str| host.variable(name).is_some();
    let has = |path: &str| host.has(path);
    let signs = [
        (
            "kubernetes",
            set("KUBERNETES_SERVICE_HOST") || is_in(&["/kubepods"]),
        ),
        (
            "docker",
            has("/.dockerenv") || is_in(&["/docker/", "/docker-"]),
        ),
        ("podman", has("/run/.containerenv") || is_in(&["/libpod-"])),
        ("lxc", is_in(&["/lxc/", "/lxc.payload"])),
        (
            "apptainer",
            set("APPTAINER_CONTAINER") || set("SINGULARITY_CONTAINER"),
        ),
    ];
    let mut names: Vec<String> = signs
        .iter()
        .filter(|(_, is_so)| *is_so)
        .map(|(name, _)| (*name).to_owned())
        .collect();
    // Written by systemd inside of a container, in the words of what made it.
    if let Some(name) = line(host, "/run/systemd/container") {
        names.push(plain(&name, CHARS_MAX));
    }
    names
}

/// The virtual machine.
fn machine(host: &Host<'_>) -> Option<&'static str> {
    let release = line(host, "/proc/sys/kernel/osrelease").unwrap_or_default();
    if release.to_ascii_lowercase().contains("microsoft") {
        return Some("wsl");
    }
    // The domain that runs the others has the hardware to itself.
    let owns_hardware =
        line(host, "/proc/xen/capabilities").is_some_and(|line| line.contains("control_d"));
    if owns_hardware {
        return None;
    }
    if line(host, "/sys/hypervisor/type").as_deref() == Some("xen") {
        return Some("xen");
    }
    let processors = text(host, "/proc/cpuinfo", BYTES_MAX).unwrap_or_default();
    let is_virtual = processors
        .lines()
        .filter(|line| line.starts_with("flags"))
        .any(|line| line.split_whitespace().any(|flag| flag == "hypervisor"));
    let names = ["sys_vendor", "product_name", "board_vendor", "bios_vendor"];
    let names = names.map(|name| line(host, &format!("/sys/class/dmi/id/{name}")));
    let names = names.map(Option::unwrap_or_default).join("\n");
    let known = [
        ("KVM", "kvm"),
        ("QEMU", "kvm"),
        ("OpenStack", "kvm"),
        ("VMware", "vmware"),
        ("VirtualBox", "virtualbox"),
        ("innotek", "virtualbox"),
        ("Xen", "xen"),
        ("Parallels", "parallels"),
        ("Virtual Machine", "hyper-v"),
        // These two rent whole machines as well, under the same names.
        ("Google Compute Engine", "kvm"),
        ("Amazon EC2", "kvm"),
    ];
    let known = known.iter().find(|(mark, _)| names.contains(mark));
    match known {
        Some(("Google Compute Engine" | "Amazon EC2", _)) if !is_virtual => None,
        Some((_, name)) => Some(name),
        None => is_virtual.then_some("virtual machine"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::recorded::Recorded;

    fn check(files: &[(&str, &str)], expect: &[&str]) {
        assert_eq!(read(&Recorded::new(files).host()), expect, "{files:?}");
    }

    #[test]
    fn containers_show_by_their_marks() {
        check(&[], &[]);
        check(&[("/.dockerenv", "")], &["docker"]);
        check(&[("/run/.containerenv", "")], &["podman"]);
        check(
            &[(
                "/proc/1/cgroup",
                "0::/kubepods.slice/kubepods-pod7.slice/cri-containerd-1.scope\n",
            )],
            &["kubernetes"],
        );
        check(
            &[
                ("/proc/self/cgroup", "12:pids:/docker/8af\n0::/\n"),
                ("/.dockerenv", ""),
            ],
            &["docker"],
        );
        check(
            &[("/proc/self/cgroup", "0::/system.slice/docker.service\n")],
            &[],
        );
        check(
            &[
                ("/run/systemd/container", "lxc\n"),
                ("/proc/1/cgroup", "0::/lxc.payload.a\n"),
            ],
            &["lxc"],
        );
        let variable =
            |name: &str| (name == "KUBERNETES_SERVICE_HOST").then(|| "10.0.0.1".to_owned());
        let recorded = Recorded::new(&[("/run/.containerenv", "")]);
        assert_eq!(
            read(&recorded.host_with(&variable)),
            ["kubernetes", "podman"]
        );
    }

    #[test]
    fn virtual_machines_show_by_name_or_flag() {
        let flags = (
            "/proc/cpuinfo",
            "processor\t: 0\nflags\t\t: fpu hypervisor sse\n",
        );
        let product = |name| ("/sys/class/dmi/id/product_name", name);
        check(
            &[
                product("Standard PC (Q35)\n"),
                ("/sys/class/dmi/id/sys_vendor", "QEMU\n"),
                flags,
            ],
            &["kvm"],
        );
        check(&[product("Google Compute Engine\n"), flags], &["kvm"]);
        check(&[product("Google Compute Engine\n")], &[]);
        check(&[product("PowerEdge R760xa\n")], &[]);
        check(
            &[product("PowerEdge R760xa\n"), flags],
            &["virtual machine"],
        );
        check(&[("/sys/hypervisor/type", "xen\n")], &["xen"]);
        check(
            &[
                ("/sys/hypervisor/type", "xen\n"),
                ("/proc/xen/capabilities", "control_d\n"),
                flags,
            ],
            &[],
        );
        check(
            &[
                (
                    "/proc/sys/kernel/osrelease",
                    "5.15-microsoft-standard-WSL2\n",
                ),
                flags,
            ],
            &["wsl"],
        );
    }
}
