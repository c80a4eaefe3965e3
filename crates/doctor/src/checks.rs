//! The names of the checks in reports.

use paceline_words::Word;

macro_rules! checks {
    ($($name:ident = $en:literal, $ko:literal;)*) => {
        $(pub(crate) const $name: Word = Word::new($en, $ko);)*
    };
}

checks! {
    ACS = "ACS", "PCIe 접근 제어(ACS)";
    ADDRESSES = "addresses", "주소";
    CLOCK = "clock", "시계";
    COMPUTE_MODE = "compute mode", "컴퓨트 모드";
    CORES = "cores", "CPU 코어";
    DISPLAY = "display", "디스플레이";
    DRIVER = "driver", "드라이버";
    ENDPOINT = "endpoint", "엔드포인트";
    FILE_SIZE = "file size", "파일 크기 한도";
    FIREWALL = "firewall", "방화벽";
    GPUS = "GPUs", "GPU 구성";
    GPU_CLOCKS = "clocks", "GPU 클럭";
    HOST_NAME = "host name", "호스트 이름";
    HUGE_PAGES = "huge pages", "거대 페이지(huge pages)";
    INTERFACES = "interfaces", "네트워크 인터페이스";
    IOMMU = "IOMMU", "IOMMU 상태";
    KERNEL = "kernel", "커널";
    KERNEL_LOG = "kernel log", "커널 로그(Xid)";
    LINKS = "links", "GPU 간 연결";
    LOCKED_MEMORY = "locked memory", "메모리 잠금 한도";
    LOGS = "logs", "로그";
    LOST_GPUS = "lost GPUs", "응답하지 않는 GPU";
    MACHINES = "machines", "머신";
    MEETING = "meeting", "노드 모임";
    MEMORY = "memory", "메모리";
    MEMORY_ERRORS = "memory errors", "GPU 메모리 오류";
    MIG = "MIG", "GPU 분할(MIG)";
    NCCL = "NCCL", "NCCL 라이브러리";
    NETWORK = "network", "네트워크";
    NODES = "nodes", "노드";
    NODE_CLOCKS = "clocks", "노드 시계";
    NOT_READ = "not read", "읽지 못한 항목";
    NUMA = "NUMA", "NUMA 배치";
    NVLINK = "NVLink", "NVLink 연결";
    NVSWITCH = "NVSwitch", "NVSwitch 상태";
    OPEN_FILES = "open files", "열린 파일 한도";
    OTHER_GPUS = "other GPUs", "다른 제조사의 GPU";
    OTHER_JOBS = "other jobs", "다른 작업";
    PCIE = "PCIe", "PCIe 연결";
    PEERMEM = "GPUDirect RDMA", "GPUDirect RDMA 모듈";
    PEER_TO_PEER = "peer-to-peer", "P2P 직접 통신";
    PERSISTENCE = "persistence", "지속 모드(persistence)";
    PORTS = "ports", "포트";
    POWER = "power", "전력";
    PROCESSES = "processes", "프로세스";
    REACHABILITY = "reachability", "노드 간 연결";
    SHM = "/dev/shm", "공유 메모리(/dev/shm)";
    TEMPERATURE = "temperature", "온도";
    VARIABLES = "variables", "환경 변수";
    VERSIONS = "versions", "버전";
}
