SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
IMAGE ?= ashlar:$(VERSION)
CHARTS ?= oci://ghcr.io/ashlar-csi/charts
FUZZTIME ?= 20s
SOAK ?= 10m
REPLICAS_AWAY ?= 20s
export FIGURES ?= bin/figures
# As what is released is built, and so that nothing is compiled twice; only the race detector needs C.
export CGO_ENABLED = 0
TIMED = hack/timed.sh

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: ## Build bin/driver, static
	go build -trimpath -ldflags "-s -w -X main.version=$(VERSION)" -o bin/driver ./cmd/driver

.PHONY: build-plugin
build-plugin: ## Build bin/kubectl-ashlar, which on the PATH is "kubectl ashlar"
	go build -trimpath -ldflags "-s -w -X main.version=$(VERSION)" -o bin/kubectl-ashlar ./cmd/kubectl-ashlar

.PHONY: plugin
plugin: ## Build kubectl ashlar for all platforms, and krew's manifest, into bin/
	VERSION=$(VERSION) hack/plugin.sh

.PHONY: demo
demo: tools build ## Take a volume through its whole life on this machine (root)
	bin/driver demo

# Tests of packages wait for disks and for times more than they compute, so twice as many run at once as there are processors. Those that take longest come first, so that
# none of them is left alone at the end. Each has a number of processes (hack/shards.sh): those of the cluster wait most, for what they share, so they are several.
# With DAYS=8, of these packages an eighth of the tests runs, each day another one.
LONGEST = pkg/cluster=3 tests/life=1 pkg/blockdev/filepool=1 tests/points=1 tests/points/elsewhere=1 tests/e2e=1 tests/crash=1 cmd/kubectl-ashlar=1 internal/page=1 \
	pkg/blockdev/filepool/internal/sparse=1 pkg/blockdev/memory=1 pkg/filesystem=1 pkg/volume=1 cmd/driver=1

# With SKIP_ROOT_TESTS=1 a test that needs root skips itself; without it, it fails.
.PHONY: test
test: ## Vet, then run every test on real devices, with the race detector (root)
ifneq ($(SKIP_ROOT_TESTS),1)
	@if [ "$$(id -u)" -ne 0 ]; then \
		echo "make test attaches and mounts devices, so it needs root."; \
		echo "To run only what does not: SKIP_ROOT_TESTS=1 make test (or make test-unit)"; \
		exit 1; \
	fi
	@hack/install-tools.sh page
	@hack/install-tools.sh docs
endif
	@hack/install-tools.sh monitoring
	@hack/apiserver.sh >/dev/null
	@$(TIMED) "make test: vet" $(MAKE) --no-print-directory vet
	@$(TIMED) "make test: packages" $(MAKE) --no-print-directory test-packages
	@$(TIMED) "make test: documents and models" $(MAKE) --no-print-directory test-models
	@$(TIMED) "make test: sanity" $(MAKE) --no-print-directory sanity
ifneq ($(SKIP_ROOT_TESTS),1)
	@$(TIMED) "make test: manifests and image" $(MAKE) --no-print-directory test-deploy
	@SAMPLE=1 $(TIMED) "make test: virtual machines" $(MAKE) --no-print-directory test-vms
endif

.PHONY: vet test-packages test-models
vet:
	go vet ./...
test-packages:
	SHARDED='$(LONGEST)' CGO_ENABLED=1 go test -exec $(CURDIR)/hack/shards.sh -race -vet=off -count=1 -timeout 40m -p $$((2 * $$(nproc))) $(foreach package,$(LONGEST),./$(firstword $(subst =, ,$(package)))) $$(go list ./... | grep -v -e /tests/sanity$$ -e /tests/docs$$ -e /tests/model/)
test-models:
	go test -count=1 -timeout 10m ./tests/docs ./tests/model/... # they read files, and explore states: the race detector only makes them ten times as slow

# Two at once, as each machine has one processor; those that take longest come first. But test-machines has two, and all that it has beside them.
VMS = test-lvm-pools test-lvm-driver test-any test-kernel
.PHONY: test-vms timed-test-machines $(VMS:%=timed-%)
test-vms: # Run what needs a virtual machine
	@hack/install-tools.sh lvm
	@hack/vm/kernel.sh >/dev/null
	@$(MAKE) --no-print-directory -j2 -Otarget $(VMS:%=timed-%)
	@$(MAKE) --no-print-directory timed-test-machines
timed-test-machines $(VMS:%=timed-%): timed-%:
	@$(TIMED) "make test-vms: $*" $(MAKE) --no-print-directory $*

.PHONY: test-cluster
test-cluster: ## Run controller and agents against a real API server
	@hack/apiserver.sh >/dev/null
	SHARDED=pkg/cluster=3 CGO_ENABLED=1 go test -exec $(CURDIR)/hack/shards.sh -race -count=1 -timeout 40m ./pkg/cluster

.PHONY: test-unit
test-unit: ## Run the tests that need no root
	@hack/install-tools.sh monitoring
	SKIP_ROOT_TESTS=1 go test ./...

# Only its counts are shown, and all that it said if it fails.
.PHONY: sanity
sanity: ## Run csi-test's sanity suite on real devices, and print its counts (root)
	@mkdir -p bin
	@status=0; CGO_ENABLED=1 go test -race -count=1 -timeout 30m -v ./tests/sanity >bin/sanity.log 2>&1 || status=$$?; \
	if [ "$$status" -eq 0 ]; then grep -aEo '(csi-sanity: .*|pending: .*|ok  .*)' bin/sanity.log; else cat bin/sanity.log; fi; \
	exit "$$status"

# ext4 growing online (it needs CAP_SYS_RESOURCE, which many containers lack) and what older kernels
# need are tested here in any case.
.PHONY: test-kernel
test-kernel: ## Run the sanity suite, tests of file pools and the lives of volumes on Linux 6.1, some under SELinux, in a virtual machine
	@hack/install-tools.sh vm
	hack/vm/test.sh

.PHONY: test-lvm
test-lvm: test-lvm-pools test-lvm-driver ## Run the tests of LVM pools, in virtual machines if this kernel has no device mapper (root)

.PHONY: test-lvm-pools test-lvm-driver
test-lvm-pools test-lvm-driver:
	@hack/install-tools.sh lvm
	hack/lvm/test.sh $(@:test-lvm-%=%)

# On a kernel that is built for it, once.
.PHONY: test-any
test-any: ## Run the tests of volumes that any node can use, in a virtual machine whose kernel has NVMe/TCP (its first run builds that, in ten to twenty minutes)
	@hack/install-tools.sh vm
	hack/vm/any.sh

# Takes half a day. A part of it: hack/vm/any.sh -test.run=TestPoints -points.time=10m
.PHONY: crash-any
crash-any: ## Kill the drivers of home and user at every state-changing system call of what is done with a volume that any node can use, and make each one fail, in a virtual machine
	@hack/install-tools.sh vm
	VM_SECONDS=0 hack/vm/any.sh -test.run=TestPoints -points.full

# On a newer kernel than that of the rest, which is built once, too. It is no part of make test. Of the sweeps it has samples; with SAMPLE=1 it is as many tests as some minutes allow.
.PHONY: test-tls
test-tls: ## Run the tests of volumes that any node can use, over TLS, in a virtual machine with Linux 6.12
	@hack/install-tools.sh vm
	kernel=$$(hack/vm/kernel.sh 6.12) && tlshd=$$(hack/vm/tlshd.sh) && VM_KERNEL=$$kernel ASHLAR_TLSHD=$$tlshd hack/vm/any.sh

# Of the same kernel as test-any. With SAMPLE=1 a part of one of its tests, which takes a minute and a half.
.PHONY: test-machines
test-machines: ## Take the power from whole machines under volumes that any node can use, or that have replicas, in virtual machines of their own
	@hack/install-tools.sh vm
	hack/vm/machines.sh $(if $(filter 1,$(SAMPLE)),,-test.v -anynode.full)

.PHONY: crash
crash: tools ## Kill the driver at every state-changing system call of every call, and make each one fail (root)
	@hack/install-tools.sh lvm
	@$(MAKE) --no-print-directory -j2 -Otarget crash-files crash-lvm

# Of file pools all, of LVM pools as many as nine minutes allow.
.PHONY: crash-files crash-lvm
crash-files:
	POINTS=all FAULTS=all go test -count=1 -timeout 60m -v ./tests/points/...
crash-lvm:
	VM_MEMORY=4096M hack/lvm/test.sh ./tests/points -test.v -test.run LVM -test.timeout 20m -points.lvm 5m -faults.lvm 4m

.PHONY: soak
soak: tools ## Make calls at random, at once, for SOAK (10m), killing the driver now and then, and check all answers (root)
	CGO_ENABLED=1 go test -race -count=1 -timeout 0 -v ./tests/soak -soak.time=$(SOAK)

.PHONY: soak-replicas
soak-replicas: ## Read and write volumes with several legs for SOAK (10m), while nodes fail and they go from one to the other, and check each read, in a virtual machine (sampled in make test)
	@hack/install-tools.sh vm
	VM_SECONDS=0 hack/vm/any.sh -test.v '-test.run=^TestReplicaLinear$$' -linear.time=$(SOAK)

# POWER_SEED=n repeats a run; POWER_CUTS=n is how often the power goes on each kind of disk.
.PHONY: power
power: ## Cut the power below the pools at any moment, with unflushed writes lost, kept or torn, in a virtual machine (sampled in make test)
	@hack/install-tools.sh lvm
	@mkdir -p bin/vm
	go test -c -o bin/vm/ ./tests/power
	VM_MEMORY=4096M VM_SECONDS=3600 hack/vm/run.sh env TMPDIR=/run ASHLAR_LVM=1 POWER_CUTS="$${POWER_CUTS:-60}" POWER_SEED="$${POWER_SEED:-}" $(CURDIR)/bin/vm/power.test -test.timeout 55m

.PHONY: model
model: ## Explore what can happen when a volume moves while it is used, with more that fails (sampled in make test)
	go test -count=1 -timeout 120m -v -run '^TestMoves$$|^TestReplicas$$|^TestLists$$' ./tests/model/... -model.large

# go test takes one fuzz target at a time, so each is found by name first.
.PHONY: fuzz
fuzz: ## Run each fuzz target for FUZZTIME (20s); without root, those that need none
	@[ "$$(id -u)" -eq 0 ] || export SKIP_ROOT_TESTS=1; \
	list=$$(go test -list '^Fuzz' ./...) || { echo "$$list"; exit 1; }; \
	targets=$$(awk '/^Fuzz/ { names[n++] = $$1 } /^ok/ { while (n) print $$2 ":" names[--n] }' <<<"$$list"); \
	[ -n "$$targets" ] || echo "no fuzz targets"; \
	for target in $$targets; do \
		echo "fuzzing $${target##*:} in $${target%:*} for $(FUZZTIME)"; \
		go test -run '^$$' -fuzz "^$${target##*:}\$$" -fuzztime $(FUZZTIME) "$${target%:*}"; \
	done

.PHONY: bench
bench: ## Measure the driver against the bare device, and draw it into FIGURES (root)
	@hack/install-tools.sh bench
	go run ./tests/bench --figures=$(FIGURES)

.PHONY: bench-quick
bench-quick: ## Measure in two minutes whether the driver is slower than that of the last commit, and than bare system calls (root)
	go run ./tests/bench --parts=quick

.PHONY: bench-limits
bench-limits: ## Measure how exactly limits of I/O are kept, over files and LVM pools, in a virtual machine (root)
	@hack/install-tools.sh lvm
	hack/lvm/test.sh ./tests/life -test.v -test.run 'TestLimits$$' -limits.within=5 -limits.for=5s -limits.tries=3
	@mkdir -p bin/vm
	go test -c -o bin/vm/ ./tests/life
	hack/vm/run.sh env ASHLAR_IO=1 $(CURDIR)/bin/vm/life.test -test.v -test.run 'TestLimits$$' -limits.within=5 -limits.for=5s -limits.tries=3

.PHONY: bench-elsewhere
bench-elsewhere: ## Measure a copy from one node to another beside a bare one over the same network, of processes on this machine (root)
	go test -run '^$$' -bench Elsewhere -benchtime 5x ./tests/points/elsewhere

.PHONY: bench-any
bench-any: ## Measure volumes that another node uses, beside a bare export, and moves, beside a bare copy, in a virtual machine (root)
	@hack/install-tools.sh vm
	VM_SECONDS=0 hack/vm/any.sh -test.run=^$$ -test.bench=. -test.skip=^BenchmarkReplicas -test.benchtime=5x

# REPLICAS is which of it, REPLICAS_AWAY for how long a replica is away.
.PHONY: bench-replicas
bench-replicas: ## Measure volumes with replicas beside DRBD, in a virtual machine (root)
	@hack/install-tools.sh bench
	@hack/install-tools.sh vm
	@hack/install-tools.sh drbd
	VM_SECONDS=0 hack/vm/any.sh -test.run=^$$ -test.bench=^BenchmarkReplicas$(REPLICAS) -test.benchtime=3x -replicas.away=$(REPLICAS_AWAY)

.PHONY: bench-cluster
bench-cluster: ## Measure the driver in a cluster, and its parts with 500 agents against an API server (root)
	@hack/install-tools.sh e2e
	tests/benchcluster/run.sh

.PHONY: picture
picture: ## Draw the page of an operator anew, as the README shows it
	@hack/install-tools.sh page
	go test -count=1 -run '^TestPictures$$' ./internal/page -page.pictures $(CURDIR)/docs

.PHONY: lint
lint: ## Check style, layering (.golangci.yml), go.mod and the workflows
	@hack/install-tools.sh lint
	@unformatted=$$(gofmt -l .); [ -z "$$unformatted" ] || { echo "not formatted (make fmt):"; echo "$$unformatted"; exit 1; }
	go mod tidy -diff
	bin/golangci-lint run
	bin/actionlint

.PHONY: generate
generate: ## Make what is generated: the custom resources' definitions, the alerts' PrometheusRule, the chart's README, docs/reference, the plots of docs/benchmarks.md
	hack/generate.sh
	go test ./cmd/driver ./cmd/kubectl-ashlar ./tests/docs -run '^TestReference' -update

.PHONY: docs
docs: ## Build the documentation site into bin/site
	@hack/install-tools.sh docs
	@hack/docs/build.sh

.PHONY: digests
digests: ## Write the digests that the sidecars' images have now into manifests and chart
	@hack/install-tools.sh release
	hack/digests.sh

.PHONY: fmt
fmt: ## Format the Go code
	@hack/install-tools.sh lint
	bin/golangci-lint fmt

.PHONY: image
image: ## Build the container image IMAGE with docker or buildah
	@for tool in docker buildah; do \
		if "$$tool" info >/dev/null 2>&1; then \
			echo "building $(IMAGE) with $$tool"; \
			exec "$$tool" build --build-arg VERSION=$(VERSION) -t $(IMAGE) .; \
		fi; \
	done; \
	echo "make image needs docker (and its daemon) or buildah, and neither is here; make image-archive needs none" >&2; exit 1

# Also for any architecture on any other.
.PHONY: image-archive
image-archive: ## Build the Dockerfile's image for amd64 and arm64 as archives in bin/, without docker (root)
	@hack/install-tools.sh image
	VERSION=$(VERSION) hack/image.sh -a amd64 $(IMAGE)
	VERSION=$(VERSION) hack/image.sh -a arm64 $(IMAGE)

.PHONY: sbom
sbom: build ## Write the bill of materials of bin/driver, as SPDX (that of the image is in the image)
	go run ./hack/sbom -name ashlar -version $(VERSION) -binary bin/driver >bin/driver.spdx.json

.PHONY: chart
chart: ## Package the chart into bin/
	@hack/install-tools.sh release
	bin/helm package deploy/charts/ashlar --destination bin

.PHONY: check-release
check-release: ## Check that the chart, the manifests and the changelog are those of VERSION
	hack/check-release.sh $(VERSION)

# The archives are those of make image-archive, the package that of make chart.
.PHONY: push
push: ## Push the archives as one image IMAGE, and the chart to CHARTS; bin/pushed has their digests
	@hack/install-tools.sh release
	hack/push.sh $(IMAGE) $(CHARTS) >bin/pushed
	@cat bin/pushed

.PHONY: test-deploy
test-deploy: ## Test the manifests and the chart, that they agree and refuse what is wrong; and that the Dockerfile builds (root)
	cd tests/deploy && go test -count=1 ./...
	cd hack/image && go test -count=1 ./...

.PHONY: e2e
e2e: ## Install the driver on a cluster, as pods, and run Kubernetes' external storage suite (root)
	@hack/install-tools.sh e2e
	@hack/install-tools.sh monitoring
	@hack/install-tools.sh page
	tests/e2e/run.sh

.PHONY: e2e-any
e2e-any: ## Run that suite over NVMe/TCP: volumes that any node can use, and pods that are never at their home, in a virtual machine (root)
	@hack/install-tools.sh e2e
	@hack/install-tools.sh vm
	tests/e2e/any.sh

.PHONY: e2e-blocks
e2e-blocks: ## Back a volume up by its changed blocks, on a cluster, through the sidecar of external-snapshot-metadata (root)
	@hack/install-tools.sh e2e
	tests/e2e/blocks.sh

.PHONY: tools
tools: # What the tests call and this machine lacks
	@hack/install-tools.sh

.PHONY: clean
clean: ## Remove what was built
	rm -rf bin
