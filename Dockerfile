# The image of the driver: one static binary and the programs it runs.
#
#   make image            or            docker build --build-arg VERSION=v1.2.3 -t ashlar .
#
# The builder runs on the machine that builds and cross-compiles for the platform that is asked for.
FROM --platform=$BUILDPLATFORM docker.io/library/golang:1.26-bookworm AS build
WORKDIR /src

# The modules are a layer of their own: it is kept while go.mod and go.sum stay as they are.
COPY go.mod go.sum ./
RUN --mount=type=cache,target=/go/pkg/mod go mod download

COPY . .
ARG TARGETOS
ARG TARGETARCH
ARG VERSION=dev
RUN --mount=type=cache,target=/go/pkg/mod \
    --mount=type=cache,target=/root/.cache/go-build \
    CGO_ENABLED=0 GOOS=$TARGETOS GOARCH=$TARGETARCH \
    go build -trimpath -ldflags "-s -w -X main.version=$VERSION" -o /driver ./cmd/driver \
    && CGO_ENABLED=0 GOOS= GOARCH= go build -trimpath -o /sbom ./hack/sbom

FROM docker.io/library/debian:bookworm-slim AS base

# e2fsprogs    mkfs.ext4; e2fsck before a mount and before growth; resize2fs
# xfsprogs     mkfs.xfs; for people: xfs_repair on a damaged volume
# btrfs-progs  mkfs.btrfs; btrfstune, which gives a copy an identity of its own; for people: btrfs check
# lvm2, thin-provisioning-tools    pools of logical volumes
# cryptsetup-bin   cryptsetup, which makes and opens encrypted volumes
# smartmontools    smartctl, which asks the disks below pools how they are
#
# The rest is system calls: loop devices, mounts, freezing, and the growth of XFS and btrfs. The kernel
# loads what modules it needs with the host's modprobe, not with one from here: there is none. So nothing here
# may run modprobe; lvm2 would, so the driver has the kernel load what lvm2 needs before that.
RUN apt-get update \
    && apt-get install -y --no-install-recommends e2fsprogs xfsprogs btrfs-progs lvm2 thin-provisioning-tools cryptsetup-bin smartmontools \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt/* /var/log/*.log \
        /usr/share/locale/* /usr/share/man/* /usr/share/info/* \
    && find /usr/share/doc -type f ! -name copyright -delete

# The bill of materials is written where the compiler's programs run, of what is in the image.
FROM build AS sbom
COPY --from=base /var/lib/dpkg/status /status
RUN /sbom -name ashlar -version "$VERSION" -binary /driver -dpkg /status >/sbom.spdx.json

FROM base
COPY LICENSE /LICENSE
COPY --from=sbom /sbom.spdx.json /sbom.spdx.json
COPY --from=build /driver /driver
# There is no udev in a container for LVM to wait for.
ENV DM_DISABLE_UDEV=1

ARG VERSION=dev
LABEL org.opencontainers.image.title="Ashlar" \
      org.opencontainers.image.description="CSI driver that cuts block volumes out of the disks a node already has" \
      org.opencontainers.image.url="https://github.com/ashlar-csi/ashlar" \
      org.opencontainers.image.source="https://github.com/ashlar-csi/ashlar" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION"

ENTRYPOINT ["/driver"]
