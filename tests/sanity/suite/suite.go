// Package suite runs csi-test's sanity suite over a driver, and counts.
package suite

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
	"github.com/onsi/ginkgo/v2"
	"github.com/onsi/ginkgo/v2/types"
	"github.com/onsi/gomega"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/ashlar-csi/ashlar/internal/drivertest"
)

// AccessTypes that the suite is run with.
var AccessTypes = []string{"mount", "block"}

// pendingInSuite is how many specs the suite itself has switched off, in each run of it:
// "pagination should detect volumes added between pages ..." of ListVolumes (an XIt since
// csi-test issue 223).
const pendingInSuite = 1

// Driver is what the suite is run over.
type Driver struct {
	Dir        string // for its paths
	Socket     string
	Controller string // socket of the controller, if it is another
	Pool       string // of its volumes, if that is not the default one
}

// Kinds of pools that the suite is run over: files, or with ASHLAR_LVM=1 both kinds of LVM
// (make test-lvm), of which a sample (SAMPLE=1) has one, the other the next day.
func Kinds() []string {
	if os.Getenv("ASHLAR_LVM") == "1" {
		kinds := []string{"linear", "thin"}
		if os.Getenv("SAMPLE") == "1" {
			today := time.Now().Unix() / 86400 % 2
			kinds = kinds[today : today+1]
		}
		return kinds
	}
	return []string{"file"}
}

// PoolURL of a new pool of a kind, for the time of a test. Files are in a directory.
func PoolURL(t testing.TB, kind, dir string) string {
	switch kind {
	case "linear":
		return drivertest.NewGroup(t, 2<<30).URL()
	case "thin":
		return drivertest.NewGroup(t, 2<<30).ThinPool(t, "tp", "-L", "1G", "--poolmetadatasize", "16M")
	default:
		return "file://" + dir + "/pool?reservePercent=0"
	}
}

// Run runs the suite once with each access type for each kind, over what start returns.
// Everything that a driver can serve is on: idempotency repeats, attach limit, group
// snapshots, modify, health. No spec may be
// skipped.
func Run(t *testing.T, kinds []string, start func(kind string) Driver) {
	gomega.RegisterFailHandler(ginkgo.Fail)
	runs := 0
	for _, kind := range kinds {
		for _, access := range AccessTypes {
			driver := start(kind)
			ginkgo.Describe("over a "+kind+" pool with "+access+" access", func() { sanity.GinkgoTest(config(driver, access)) })
			runs++
		}
	}
	var counts map[types.SpecState]int
	ginkgo.ReportAfterSuite("counts", func(report ginkgo.Report) {
		counts = map[types.SpecState]int{}
		for _, spec := range report.SpecReports {
			if spec.LeafNodeType != types.NodeTypeIt {
				continue
			}
			counts[spec.State]++
			if spec.State.Is(types.SpecStateSkipped | types.SpecStatePending) {
				fmt.Fprintf(os.Stderr, "%s: %s %s\n", spec.State, spec.FullText(), spec.Failure.Message)
			}
		}
	})
	suite, reporter := ginkgo.GinkgoConfiguration()
	reporter.Succinct = true
	passed := ginkgo.RunSpecs(t, "csi-sanity", suite, reporter)
	failed := 0
	for state, n := range counts {
		if state.Is(types.SpecStateFailureStates) {
			failed += n
		}
	}
	fmt.Fprintf(os.Stderr, "csi-sanity: %d passed, %d failed, %d skipped, %d switched off in the suite itself\n",
		counts[types.SpecStatePassed], failed, counts[types.SpecStateSkipped], counts[types.SpecStatePending])
	if !passed || failed != 0 {
		t.Error("specs failed")
	}
	if counts[types.SpecStateSkipped] != 0 {
		t.Error("specs were skipped: the driver does not serve, or the configuration does not switch on, all that the suite tests")
	}
	if counts[types.SpecStatePending] != pendingInSuite*runs {
		t.Errorf("%d specs are switched off in the suite, expected %d: look at what is new", counts[types.SpecStatePending], pendingInSuite*runs)
	}
}

func config(driver Driver, access string) *sanity.TestConfig {
	c := sanity.NewTestConfig()
	c.Address = "unix://" + driver.Socket
	c.TargetPath = filepath.Join(driver.Dir, "target")
	c.StagingPath = filepath.Join(driver.Dir, "staging")
	c.TestVolumeSize = 16 << 20
	c.TestVolumeExpandSize = 32 << 20
	c.TestVolumeAccessType = access
	c.TestNodeVolumeAttachLimit = true
	if driver.Pool != "" {
		c.TestVolumeParameters = map[string]string{"pool": driver.Pool}
	}
	c.TestVolumeMutableParameters = map[string]string{"readAheadKiB": "256", "ioScheduler": "none"}
	c.DialOptions = append(c.DialOptions, grpc.WithUnaryInterceptor(fillCaches))
	if driver.Controller != "" {
		c.ControllerAddress = "unix://" + driver.Controller
		c.ControllerDialOptions = append(c.ControllerDialOptions, grpc.WithUnaryInterceptor(fillCaches))
	}
	return &c
}

// fillCaches: the suite compares the topologies of two responses field by field, caches that
// protobuf keeps within messages included (gomega's Equal). Encoding a message once fills
// them, so that equal messages are equal in this sense too.
func fillCaches(ctx context.Context, method string, request, response any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, options ...grpc.CallOption) error {
	err := invoke(ctx, method, request, response, conn, options...)
	if err == nil {
		_, err = proto.Marshal(response.(proto.Message))
	}
	return err
}
