// Package sanity runs csi-test's sanity suite over the whole driver, in this process,
// on real devices.
package sanity

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
	. "github.com/onsi/ginkgo/v2"
	"github.com/onsi/ginkgo/v2/types"
	. "github.com/onsi/gomega"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
)

// The suite is run once for each access type.
var accessTypes = []string{"mount", "block"}

func TestSanity(t *testing.T) {
	drivertest.NeedRoot(t)
	drivertest.NothingLeft(t)
	RegisterFailHandler(Fail)
	for _, access := range accessTypes {
		Describe("CSI sanity with "+access+" access", func() { register(t, access) })
	}
	suite, reporter := GinkgoConfiguration()
	reporter.Succinct = true
	ran := RunSpecs(t, "csi-sanity", suite, reporter)
	if !ran {
		t.Error("the suite failed")
	}
}

var _ = ReportAfterSuite("counts", func(report Report) {
	var passed, failed, skipped int
	for _, spec := range report.SpecReports {
		if spec.LeafNodeType != types.NodeTypeIt {
			continue
		}
		switch spec.State {
		case types.SpecStatePassed:
			passed++
		case types.SpecStateSkipped, types.SpecStatePending:
			skipped++
			GinkgoWriter.Printf("")
			println("skipped:", spec.FullText(), "-", spec.State.String(), spec.Failure.Message)
		default:
			failed++
		}
	}
	println("csi-sanity:", passed, "passed,", failed, "failed,", skipped, "skipped")
})

func register(t *testing.T, access string) {
	dir := t.TempDir()
	config := sanity.NewTestConfig()
	config.TargetPath = filepath.Join(dir, "target")
	config.StagingPath = filepath.Join(dir, "staging")
	config.TestVolumeSize = 16 << 20
	config.TestVolumeExpandSize = 32 << 20
	config.TestVolumeAccessType = access
	config.TestNodeVolumeAttachLimit = true
	config.TestVolumeMutableParameters = map[string]string{"readAheadKiB": "256"}
	var ctx context.Context
	BeforeEach(func() { _ = ctx })
	driver := drivertest.Start(t, drivertest.Options{MaxVolumes: 4, Dir: filepath.Join(dir, "pool")})
	config.Address = "unix://" + driver.Socket
	_ = os.Stderr
	sanity.GinkgoTest(&config)
	Expect(true).To(BeTrue())
}
