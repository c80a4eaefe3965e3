//! What the launcher and the ranks need of the kernel, tried out rather than guessed from its version.

use paceline_words::say;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::process::{PidfdFlags, WaitId, WaitIdOptions};

use crate::checks;
use crate::finding::Notes;
use paceline_gpu::host::Host;

/// What was tried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Kernel {
    pub(crate) release: String,
    pub(crate) arch: String,
    /// A handle on a process, and waiting for it (Linux 5.4).
    pub(crate) pidfd: Result<(), String>,
    /// Shared memory without a name that cannot change its size (Linux 3.17).
    pub(crate) memfd: Result<(), String>,
    /// Whether `/proc` is there.
    pub(crate) has_proc: bool,
    /// Which mappings get huge pages for shared memory: `always`, `within_size`, `advise`, `never`, `deny`, `force`.
    pub(crate) huge_pages: Option<String>,
}

pub(crate) fn read(host: &Host<'_>) -> Kernel {
    let name = rustix::system::uname();
    let setting = host.text("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
    Kernel {
        release: name.release().to_string_lossy().into_owned(),
        arch: name.machine().to_string_lossy().into_owned(),
        pidfd: try_pidfd().map_err(|error| error.to_string()),
        memfd: try_memfd().map_err(|error| error.to_string()),
        has_proc: host.path("/proc/self/stat").exists(),
        huge_pages: setting.as_deref().and_then(chosen).map(str::to_owned),
    }
}

fn try_pidfd() -> rustix::io::Result<()> {
    let handle = rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty())?;
    // Waiting for oneself is refused with ECHILD by a kernel that knows the call.
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
    match rustix::process::waitid(WaitId::PidFd(std::os::fd::AsFd::as_fd(&handle)), options) {
        Err(rustix::io::Errno::CHILD) | Ok(_) => Ok(()),
        Err(error) => Err(error),
    }
}

fn try_memfd() -> rustix::io::Result<()> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("paceline-doctor", flags)?;
    rustix::fs::ftruncate(&file, 4096)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
}

/// The word in brackets.
fn chosen(setting: &str) -> Option<&str> {
    let (_, rest) = setting.split_once('[')?;
    Some(rest.split_once(']')?.0)
}

pub(crate) fn judge(kernel: &Kernel, notes: &mut Notes) {
    let lang = notes.lang;
    let mut sheet = notes.sheet(checks::KERNEL);
    let (release, arch) = (&kernel.release, &kernel.arch);
    sheet.fact(say!(
        lang,
        "Linux {release} on {arch}",
        "Linux {release}({arch} 프로세서)"
    ));
    let fix = || {
        say!(
            lang,
            "use Linux 5.4 or newer; in a container or sandbox allow the call (its seccomp profile)",
            "Linux 5.4 이상을 쓰세요. 컨테이너나 샌드박스에서는 이 시스템 호출을 허용하세요(seccomp 프로파일)"
        )
    };
    if let Err(reason) = &kernel.pidfd {
        sheet.error(
            say!(
                lang,
                "the kernel gives no handle on a process (pidfd_open, waitid): {reason}",
                "커널이 프로세스 핸들을 제공하지 않음(pidfd_open, waitid): {reason}"
            ),
            say!(
                lang,
                "the launcher watches its ranks by such handles and cannot start them without",
                "런처는 이 핸들로 랭크를 지켜보므로, 없으면 랭크를 시작할 수 없습니다"
            ),
            fix(),
        );
    }
    if let Err(reason) = &kernel.memfd {
        sheet.error(
            say!(
                lang,
                "the kernel gives no sealed memory file (memfd_create): {reason}",
                "커널이 봉인된 메모리 파일을 제공하지 않음(memfd_create): {reason}"
            ),
            say!(
                lang,
                "ranks of one machine share such memory, and the launcher reads there what they are doing",
                "같은 머신의 랭크는 이 메모리를 공유하고, 런처는 여기서 랭크가 하는 일을 읽습니다"
            ),
            fix(),
        );
    }
    if !kernel.has_proc {
        sheet.error(
            say!(lang, "/proc is not mounted", "/proc이 마운트되어 있지 않음"),
            say!(
                lang,
                "the launcher finds there what a job has left behind, so that nothing of it stays",
                "런처는 /proc에서 작업이 남긴 프로세스를 찾아 모두 정리합니다"
            ),
            say!(
                lang,
                "`mount -t proc proc /proc` in the container or chroot",
                "컨테이너나 chroot 안에서 `mount -t proc proc /proc`을 실행하세요"
            ),
        );
    }
    let mut sheet = notes.sheet(checks::HUGE_PAGES);
    let Some(mode) = kernel.huge_pages.as_deref() else {
        return sheet.fact(say!(
            lang,
            "the kernel does not tell",
            "커널이 알려 주지 않음"
        ));
    };
    sheet.fact(say!(
        lang,
        "for shared memory: {mode}",
        "공유 메모리: {mode}"
    ));
    if matches!(mode, "never" | "deny") {
        sheet.note(
            say!(
                lang,
                "shared memory gets no huge pages: shmem_enabled is {mode}",
                "공유 메모리가 거대 페이지(huge pages)를 쓰지 못함: shmem_enabled 값이 {mode}"
            ),
            say!(
                lang,
                "large reductions between ranks of this machine are faster with them; Paceline asks for them where it may",
                "거대 페이지(huge pages)를 쓰면 이 머신의 랭크 사이에서 큰 리듀스가 더 빨라집니다. Paceline은 허용되는 곳에서 거대 페이지를 요청합니다"
            ),
            say!(
                lang,
                "`echo advise | sudo tee /sys/kernel/mm/transparent_hugepage/shmem_enabled`",
                "`echo advise | sudo tee /sys/kernel/mm/transparent_hugepage/shmem_enabled`를 실행하세요"
            ),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::tests::{found, noted};
    use paceline_gpu::host::recorded::Recorded;

    fn sound() -> Kernel {
        Kernel {
            release: "6.8.0".into(),
            arch: "x86_64".into(),
            pidfd: Ok(()),
            memfd: Ok(()),
            has_proc: true,
            huge_pages: Some("advise".into()),
        }
    }

    #[test]
    fn what_the_kernel_lacks_is_said() {
        let check = |kernel: Kernel, expect: &[&str]| {
            let notes = noted(|notes| judge(&kernel, notes));
            assert_eq!(found(&notes), expect, "{kernel:?}");
        };
        check(sound(), &[]);
        let no = || Err("Function not implemented".to_owned());
        let old = Kernel {
            pidfd: no(),
            memfd: no(),
            has_proc: false,
            ..sound()
        };
        let newer = "error: kernel: use Linux 5.4 or newer";
        check(
            old,
            &[newer, newer, "error: kernel: `mount -t proc proc /proc`"],
        );
        let never = Kernel {
            huge_pages: Some("never".into()),
            ..sound()
        };
        check(never, &["note: huge pages: `echo advise"]);
    }

    #[test]
    fn this_kernel_has_what_the_tests_of_this_project_run_on() {
        let recorded = Recorded::new(&[
            ("/proc/self/stat", ""),
            (
                "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
                "always within_size [advise] never deny force\n",
            ),
        ]);
        let kernel = read(&recorded.host());
        assert_eq!((&kernel.pidfd, &kernel.memfd), (&Ok(()), &Ok(())));
        assert_eq!(kernel.huge_pages.as_deref(), Some("advise"));
        assert!(kernel.has_proc);
        for odd in ["", "[", "x]["] {
            assert_eq!(chosen(odd), None, "{odd}");
        }
    }
}
